"""Division of one attention score among pairs of terms: sources, singular modes, features or rotary frequencies.

A source is an earlier component (embedding, head, MLP) that wrote to the residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.attribution.asked_positions import AskedPosition
from tlspectral.hooks.attribution.dictionary import Dictionary
from tlspectral.hooks.attribution.own_score import QueryRow, query_row
from tlspectral.hooks.attribution.score_terms import (
    HeadForm,
    head_form,
    pair_parts,
    readable_group,
    removed_key_terms,
    removed_pairs,
)
from tlspectral.hooks.attribution.stream_terms import StreamTerms, TracedRun, source_terms, traced_run
from tlspectral.models.attention.head_scores import rotation_tables
from tlspectral.models.attention.modes import query_key_modes
from tlspectral.models.reading.layer import fold_attention, require_even_scale, require_own_projections
from tlspectral.models.reading.view import AttentionView

DividedBy = Literal["source", "mode", "frequency"]

BIAS, ALIBI = "bias", "alibi"


@dataclass(frozen=True)
class DividedScore:
    """One attention score of one prompt as a sum over pairs of terms of the query's and the key's residual stream.

    Attributes:
        run: activations of the run. Its first two tokens are the query and the key.
        form: the head's score as a function of the two streams.
        row: the scores of the query for all keys in the run.
        query, key: the terms of the two streams; for a division by frequency one term, the whole stream.
        names: names of the terms at the query and at the key, each followed by "bias" and "alibi".
        pairs: for each row the index of its query term and of its key term in `names`.
        parts: four parts of each row, in logits: M_S, M_A, Im(M_t), and terms with biases or ALiBi.
        activations: feature activations of a dictionary at all tokens of the run; None without a dictionary.
    """

    run: TracedRun
    form: HeadForm
    row: QueryRow
    query: StreamTerms
    key: StreamTerms
    names: tuple[list[str], list[str]]
    pairs: Int[Tensor, "rows two"]
    parts: Float64[Tensor, "parts rows"]
    activations: Float64[Tensor, "tokens features"] | None = None

    @property
    def total(self) -> Float64[Tensor, "rows"]:
        """Sum of the four parts of each row, in logits."""
        return self.parts.sum(0)

    @property
    def remainder(self) -> float:
        """The model's own score minus the sum of all rows, in logits."""
        return self.row.score - float(self.total.sum())

    def without(self, pairs: list[tuple[str, str]]) -> Float64[Tensor, "pairs"]:
        """Return for each pair of terms the score, in logits, that is lost when the pair is removed alone.

        Every norm is computed again. `pairs` are names of a query term and a key term. A pair that this score does not
        have gives 0.
        """
        lost = torch.zeros(len(pairs), dtype=torch.float64)
        of_query, of_key = self.names
        known = [place for place, (one, other) in enumerate(pairs) if one in of_query and other in of_key]
        ends = [(of_query.index(pairs[place][0]), of_key.index(pairs[place][1])) for place in known]
        removed = torch.tensor(ends).reshape(-1, 2)
        # ALiBi does not depend on the streams: without it the score loses exactly its value.
        is_alibi = removed[:, 0] == len(self.names[0]) - 1
        streams = (self.query.written, self.key.written, self.run.residual[:2])
        measured = removed_pairs(self.form, *streams, torch.where(is_alibi[:, None], 0, removed))
        lost[known] = torch.where(is_alibi, torch.tensor(self.row.alibi or 0.0, dtype=torch.float64), measured)
        return lost

    def without_key_terms(self, gone: list[str]) -> tuple[float, float]:
        """Return the score that is lost without some terms in the key: predicted (sum of their rows), and measured.

        `gone` are names of key terms, which are removed together. For the measured loss every norm is computed again.
        Both are in logits.
        """
        names = self.names[1]
        numbers = {names.index(name) for name in gone if name in names}
        predicted = self.total[torch.isin(self.pairs[:, 1], torch.tensor(sorted(numbers)))].sum()
        measured = removed_key_terms(self.form, self.key.written, self.run.residual[:2], numbers)
        alibi = (self.row.alibi or 0.0) * (len(names) - 1 in numbers)
        return float(predicted), float(measured) + alibi


def divided_score(
    view: AttentionView,
    head: tuple[int, int],
    asked: AskedPosition,
    by: DividedBy,
    dictionary: Dictionary | None = None,
) -> DividedScore:
    """Divide one attention score of a head among sources, features, modes or frequencies; return the `DividedScore`.

    `head` is (layer, head), `asked` the prompt with the positions of query and key. `by` is "source", "mode" (singular
    vectors of the head's query-key matrix) or "frequency" (rotary pairs). With a `dictionary` the terms are its
    features. Raises ScoreMismatch if the rows do not add up to the model's score, UnsupportedArchitecture if the layer
    cannot be divided, and ValueError for a masked key.
    """
    if by == "frequency":
        return _by_frequency(view, head, asked)
    run, form, row = _traced(
        view, head, asked, sources=by == "source" and dictionary is None, every=dictionary is not None
    )
    activations = None
    if dictionary is not None:
        activations = dictionary.activations(run.residual)
        at_query, at_key = map(dictionary.terms, run.residual[:2], activations[:2])
    elif by == "source":
        names, written = source_terms(view, run)
        at_query, at_key = StreamTerms(names, written[0]), StreamTerms(names, written[1])
    else:
        at_query, at_key = _modes(view, head, run)
    parts, biased = pair_parts(form, at_query.written, at_key.written, run.residual[:2])
    present = torch.ones(parts.shape[1:], dtype=torch.bool)
    present[-1], present[:, -1] = biased
    present[-1, -1] = all(biased)
    names = ([*at_query.names, BIAS, ALIBI], [*at_key.names, BIAS, ALIBI])
    divided = _with_alibi(run, form, row, at_query, at_key, names, present.nonzero(), parts[:, present])
    return replace(divided, activations=activations)


def _by_frequency(view: AttentionView, head: tuple[int, int], asked: AskedPosition) -> DividedScore:
    """Divide a score among the rotary pairs of the head; return the `DividedScore`.

    `head` is (layer, head), `asked` the prompt with the positions of query and key. Rows are named "frequency 0", ...;
    columns that do not rotate are one row, "no rotation". Raises UnsupportedArchitecture for a layer without rotary
    positions, ScoreMismatch if the rows do not add up to the model's score.
    """
    layer = head[0]
    rotary = view.rotary(layer)
    if rotary is None:
        raise UnsupportedArchitecture(
            f"layer {layer} has no rotary positions, so its scores have no frequencies: give by='source' or by='mode'"
        )
    run, form, row = _traced(view, head, asked, sources=False)
    columns = form.query.reads.weight.new_zeros(rotary.n_pairs, form.query.reads.weight.shape[-1])
    frequencies = torch.arange(rotary.n_pairs)
    columns[frequencies, rotary.real_index] = columns[frequencies, rotary.imag_index] = 1.0
    names = [f"frequency {number}" for number in range(rotary.n_pairs)]
    if len(rotary.still_columns):
        columns, names = torch.cat([columns, 1.0 - columns.sum(0, keepdim=True)]), [*names, "no rotation"]
    at_query, at_key = (StreamTerms(["stream"], run.residual[[token]]) for token in (0, 1))
    parts, _ = pair_parts(form, at_query.written, at_key.written, run.residual, columns)
    parts = parts.sum((-2, -1)).mT
    pairs = torch.arange(len(names))[:, None].expand(-1, 2)
    both = [*names, BIAS, ALIBI]
    return _with_alibi(run, form, row, at_query, at_key, (both, both), pairs, parts)


def _traced(
    view: AttentionView, head: tuple[int, int], asked: AskedPosition, *, sources: bool, every: bool = False
) -> tuple[TracedRun, HeadForm, QueryRow]:
    """Run the prompt of a score; return its activations, the head's score function and the query's own scores.

    `view` is the model, `head` is (layer, head), `asked` the prompt with the positions of query and key. The
    `TracedRun` has the query's stream as entry 0 and the key's stream as entry 1. `sources`: True also keeps the writes
    of earlier layers. `every`: True adds the streams of all tokens, behind these two. Raises UnsupportedArchitecture
    for latents with norms, ValueError for a prompt too long for the layer's score scale or a masked key, ScoreMismatch
    if the scores of the run are not the model's.
    """
    layer, length = head[0], asked.tokens.shape[1]
    raw = view.raw(layer)
    require_even_scale(raw, layer, length)
    require_own_projections(raw, layer, "a score cannot be divided, because its latents have norms")
    assert asked.key is not None  # one score has one key
    positions = [asked.query, asked.key, *(range(length) if every else ())]
    run = traced_run(view, asked.tokens, layer, positions, sources=sources)
    tables = rotation_tables(view, raw.rotary, layer, length, run.captured)
    form = head_form(view, *head, asked.query, asked.key, tables)
    return run, form, query_row(view, run, form, tables, asked.query, asked.key)


def _with_alibi(
    run: TracedRun,
    form: HeadForm,
    row: QueryRow,
    at_query: StreamTerms,
    at_key: StreamTerms,
    names: tuple[list[str], list[str]],
    pairs: Tensor,
    parts: Tensor,
) -> DividedScore:
    """Return the `DividedScore` with these fields, with a further row for ALiBi if the layer has it.

    `run` are the activations, `form` is the head's score function, `row` has the query's own scores. `at_query` and
    `at_key` are the terms of the two streams, `names` their names followed by "bias" and "alibi", `pairs` the indices
    of the two terms of each row, `parts` the four parts of each row. No argument is changed. Raises ScoreMismatch if
    the rows do not add up to the model's score.
    """
    if row.alibi is not None:
        pairs = torch.cat([pairs, torch.tensor([[len(names[0]) - 1, len(names[1]) - 1]])])
        parts = torch.cat([parts, parts.new_tensor([[0.0], [0.0], [0.0], [row.alibi]])], dim=1)
    row.require_sum(float(parts.sum()))
    return DividedScore(run, form, row, at_query, at_key, names, pairs, parts)


def _modes(view: AttentionView, head: tuple[int, int], run: TracedRun) -> tuple[StreamTerms, StreamTerms]:
    """Return the query's and the key's stream as components along the singular vectors of M, plus a rest `no mode`.

    `view` is the model. `head` is (layer, head), `run` the run with the two streams. M is the query-key matrix W_Q
    W_K^T, norms folded in. The total of the rest is 0, unless M has a lower rank than W_Q or W_K. With the tokens
    exchanged its score need not be 0, so its symmetric and antisymmetric parts can differ from 0 and cancel.
    """
    group, first = readable_group(view.raw(head[0]), head[1])
    (modes,) = query_key_modes(fold_attention(group, head[0]), [head[1] - first])
    names = [f"mode {number}" for number in range(len(modes.values))]
    terms = []
    for stream, vectors in zip(run.residual[:2], (modes.query, modes.key), strict=True):
        written = (stream @ vectors)[:, None] * vectors.T
        terms.append(StreamTerms([*names, "no mode"], torch.cat([written, (stream - written.sum(0))[None]])))
    return terms[0], terms[1]
