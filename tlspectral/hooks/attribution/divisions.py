"""One score of one prompt, divided among pairs of terms: sources, singular modes, features or rotary frequencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.attribution.asked_scores import AskedScore
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
    """One score of one prompt as a sum over pairs of terms.

    Attributes:
        query, key: the terms of the two streams; of a division by frequency both streams as they are.
        names: of the terms at the query and at the key, behind them the bias of the projection and ALiBi.
        pairs: numbers of the terms of each row.
        parts: the four `PARTS` of each row.
        activations: of the features of a dictionary at all tokens of the run; None without a dictionary.
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
        """Sum of the parts of each row."""
        return self.parts.sum(0)

    @property
    def remainder(self) -> float:
        """By how much the model's own score exceeds the sum of the rows."""
        return self.row.score - float(self.total.sum())

    def without(self, pairs: list[tuple[str, str]]) -> Float64[Tensor, "pairs"]:
        """Return what the score loses with each of some pairs of terms, all norms taken again; 0 for no such pair."""
        lost = torch.zeros(len(pairs), dtype=torch.float64)
        numbers = [self._numbers(*pair) for pair in pairs]
        known = [place for place, pair in enumerate(numbers) if pair is not None]
        given = torch.tensor([numbers[place] for place in known]).reshape(-1, 2)
        # Nothing is read of ALiBi, so that the score without it is the score less its value.
        is_alibi = given[:, 0] == len(self.names[0]) - 1
        streams = (self.query.written, self.key.written, self.run.residual[:2])
        measured = removed_pairs(self.form, *streams, torch.where(is_alibi[:, None], 0, given))
        lost[known] = torch.where(is_alibi, torch.tensor(self.row.alibi or 0.0, dtype=torch.float64), measured)
        return lost

    def without_key_terms(self, gone: list[str]) -> tuple[float, float]:
        """Return what the score loses without all of some terms in the key: the sum of their rows, and measured."""
        names = self.names[1]
        numbers = {names.index(name) for name in gone if name in names}
        predicted = self.total[torch.isin(self.pairs[:, 1], torch.tensor(sorted(numbers)))].sum()
        measured = removed_key_terms(self.form, self.key.written, self.run.residual[:2], numbers)
        alibi = (self.row.alibi or 0.0) * (len(names) - 1 in numbers)
        return float(predicted), float(measured) + alibi

    def _numbers(self, at_query: str, at_key: str) -> tuple[int, int] | None:
        known = at_query in self.names[0] and at_key in self.names[1]
        return (self.names[0].index(at_query), self.names[1].index(at_key)) if known else None


def divided_score(
    view: AttentionView, head: tuple[int, int], asked: AskedScore, by: DividedBy, dictionary: Dictionary | None = None
) -> DividedScore:
    """Divide one score of a run among sources, features, modes or frequencies. Raises as `qk_attribution`."""
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


def _by_frequency(view: AttentionView, head: tuple[int, int], asked: AskedScore) -> DividedScore:
    """Divide a score among the rotary pairs of the head, and columns that do not turn."""
    layer = head[0]
    rotary = view.rotary(layer)
    if rotary is None:
        raise UnsupportedArchitecture(
            f"layer {layer} has no rotary positions, so its scores have no frequencies: by='source' or by='mode'"
        )
    run, form, row = _traced(view, head, asked, sources=False)
    columns = form.query.reads.weight.new_zeros(rotary.n_pairs, form.query.reads.weight.shape[-1])
    each = torch.arange(rotary.n_pairs)
    columns[each, rotary.real_index] = columns[each, rotary.imag_index] = 1.0
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
    view: AttentionView, head: tuple[int, int], asked: AskedScore, *, sources: bool, every: bool = False
) -> tuple[TracedRun, HeadForm, QueryRow]:
    layer, length = head[0], asked.tokens.shape[1]
    raw = view.raw(layer)
    require_even_scale(raw, layer, length)
    require_own_projections(raw, layer, "a score is not taken apart through the norms of its latents")
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
    if row.alibi is not None:
        pairs = torch.cat([pairs, torch.tensor([[len(names[0]) - 1, len(names[1]) - 1]])])
        parts = torch.cat([parts, parts.new_tensor([[0.0], [0.0], [0.0], [row.alibi]])], dim=1)
    row.require_sum(float(parts.sum()))
    return DividedScore(run, form, row, at_query, at_key, names, pairs, parts)


def _modes(view: AttentionView, head: tuple[int, int], run: TracedRun) -> tuple[StreamTerms, StreamTerms]:
    """Return the components of the two streams along the singular vectors of M, and what is left of the streams.

    The head reads nothing of what is left, but where M has a lower rank than W_Q or W_K. With the tokens exchanged it
    reads some: then it adds to the symmetric part what it takes from the antisymmetric one.
    """
    group, first = readable_group(view.raw(head[0]), head[1])
    (modes,) = query_key_modes(fold_attention(group, head[0]), [head[1] - first])
    names = [f"mode {number}" for number in range(len(modes.values))]
    terms = []
    for stream, vectors in zip(run.residual[:2], (modes.query, modes.key), strict=True):
        written = (stream @ vectors)[:, None] * vectors.T
        terms.append(StreamTerms([*names, "no mode"], torch.cat([written, (stream - written.sum(0))[None]])))
    return terms[0], terms[1]
