"""`detect_heads`: how much attention a head gives to the previous token, the duplicate, and other marked keys (FP 3).

By default on sequences `[BOS, r, r]` of a random segment r and its copy, on the queries of the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture, warn_caller
from tlspectral.heads.detectors.chance import ByLayer, SeenKeys
from tlspectral.heads.detectors.rotated_keys import rotated_key_pvalues
from tlspectral.heads.detectors.sinks import Sinks, asked_for_sinks, found_sinks
from tlspectral.heads.detectors.spread import Spread
from tlspectral.heads.detectors.targets import Marks, Reduce, Scorer
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, batch_on, even_rows, rows_of_scores
from tlspectral.models.running.given import given_prompts
from tlspectral.models.running.passes import run_until
from tlspectral.models.running.prompts import distinct_rows, equality_notes, packed_prompts, packed_rows
from tlspectral.selection import counted
from tlspectral.tables.detector_columns import DETECTORS
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.progress import bar
from tlspectral.tables.schema import Column, Schema, columns
from tlspectral.tasks.control_tests import draws_floor
from tlspectral.tasks.repeated import (
    detector_pairs,
    repeated_ids,
    repeated_marks,
    repeated_sequences,
    segment_length_of,
)

BATCH = 25
FIRST_STOP = 25
"""Sequences after which the standard errors are first compared with `max_se`; then after twice as many, and so on."""
NULL_SEQUENCES, _NULL_TOKENS = 16, 2**12
"""Sequences that scores are compared with their null on, as far as they have so many tokens together."""

Pattern = Callable[[Tensor], Any] | Any
"""Keys that count for a query: weights [pos, pos], a function of a prompt's ids that returns them, or a name."""


def _scored(name: str, meaning: str) -> tuple[Column, ...]:
    return columns(f"""
        {name}    | attention probability | {meaning}
        {name}_se | attention probability | Its standard error over distinct sequences; NaN below two that count.
        {name}_p? | probability           | Share of draws of the null, the head itself among them, that reach {name}.
    """)


def _at_times(name: str, meaning: str) -> tuple[Column, ...]:
    return tuple(replace(column, always=False) for column in _scored(name, meaning))


_PATTERN = _at_times("pattern", "Mean weighted attention to the keys marked by `pattern=`. NaN where none counts.")
_NEXT = "Mean attention from each query to the token after it, where there is one. For encoders alone."
DETECT_HEADS = Schema(
    "detect_heads",
    (
        *HEAD,
        *chain.from_iterable(
            _scored(one.name, f"Mean attention from each query of the copy to {one.target_in_copy}.")
            for one in DETECTORS.values()
        ),
        *_scored("prev_first", "prev on the queries of the segment, the first one left out."),
        *_at_times("next", _NEXT),
        *_PATTERN,
    ),
    "`tls.detect_heads`",
)
DETECT_HEADS_ON_PROMPTS = Schema(
    "detect_heads.prompts",
    (
        *HEAD,
        *chain.from_iterable(_scored(one.name, one.on_prompts) for one in DETECTORS.values()),
        *_scored("self", "Mean attention from each query to its own token. NaN where no query counts."),
        *_at_times("next", _NEXT),
        *_PATTERN,
        *columns("""
            entropy              | nat                   | Mean entropy of a query's attention.
            entropy_se           | nat                   | Its standard error over distinct prompts.
            distance             | token                 | Mean distance of query and key, weighted by attention.
            distance_se          | token                 | Its standard error over distinct prompts.
            start_share          | attention probability | Mean attention to position 0.
            start_share_se       | attention probability | Its standard error over distinct prompts.
            entropy_sinkless     | nat                   | Mean entropy of a query's attention to all keys but position
                                 |                       | 0, scaled to 1, over queries that give these at least .05.
            entropy_sinkless_se  | nat                   | Its standard error over distinct prompts, as of a ratio.
            distance_sinkless    | token                 | Sum of attention times distance over all queries and all keys
                                 |                       | but position 0, over the sum of that attention.
            distance_sinkless_se | token                 | Its standard error over distinct prompts, as of a ratio.
            sinkless_rows        | share                 | Queries that give keys other than position 0 at least .05.
            sinkless_rows_se     | share                 | Its standard error over distinct prompts.
            sink_share?          | attention probability | Mean attention to all sinks of the layer on the prompt, as
                                 |                       | `tls.heads.attention_sinks` finds them. With sinks="found",
                                 |                       | as the columns below: over prompts on which some key of the
                                 |                       | layer is decided, NaN without such a prompt.
            sink_share_se?       | attention probability | Its standard error over distinct prompts.
            entropy_no_sinks?    | nat                   | Mean entropy of a query's attention to all keys but the
                                 |                       | layer's sinks, scaled to 1, over queries that give these
                                 |                       | keys at least .05.
            entropy_no_sinks_se? | nat                   | Its standard error over distinct prompts, as of a ratio.
            distance_no_sinks?   | token                 | Sum of attention times distance over all queries and all keys
                                 |                       | but the layer's sinks, over the sum of that attention.
            distance_no_sinks_se? | token                | Its standard error over distinct prompts, as of a ratio.
            no_sinks_rows?       | share                 | Queries that give keys other than the sinks at least .05.
            no_sinks_rows_se?    | share                 | Its standard error over distinct prompts.
        """),
    ),
    "`tls.detect_heads` with `prompts=` other than repeated segments",
)


def detect_heads(
    model: Any,
    *,
    n_sequences: int = 200,
    max_se: float | None = 0.02,
    segment_length: int = 64,
    prompts: Any = None,
    pattern: Pattern | None = None,
    sinks: str | None = None,
    null_draws: int = 0,
    seed: int = 0,
) -> pd.DataFrame:
    """Measure the attention of every head on random repeated sequences, or on prompts of your own.

    >>> import tlspectral as tls
    >>> scores = tls.detect_heads(tls.load_model("tiny-rope"), n_sequences=8)
    >>> scores.loc[scores["prev"].idxmax(), "name"]
    'L0H3'

    On sequences [BOS, r, r] with a segment of L tokens, queries are positions L+1 .. 2L and the mass is read on p - 1
    (`prev`), p - L (`dup`, the same token before) and p - L + 1 (`ind`, the token that followed it). On `prompts`,
    queries are all real tokens from position 2 on, and the mass is read on the token before (`prev`), on all earlier
    tokens equal to the query's (`dup`, over the queries that have one), on the tokens that followed these (`ind`) and
    on the query's own (`self`). Prompts that are token ids [sequences, 1 + 2 L], an opening token, a segment of two or
    more and the same segment again in every row, are measured as drawn sequences are. Hooks on the model stay in force.

    On prompts the table also says how widely a head attends (`entropy`), how far (`distance`) and how much to the first
    token (`start_share`). Many heads attend to that token when they have nothing to do, and then `distance` says how
    often they do so. `entropy_sinkless` and `distance_sinkless` are therefore of all other keys. They are ratios of
    sums over all prompts, so that a prompt in which the head attends to the first token alone hardly counts. With
    `sinks="found"`, `entropy_no_sinks` and `distance_no_sinks` leave out every key that is a sink instead.

    After 25, 50, 100, ... drawn sequences the standard errors are looked at, and no more are run once the largest of
    `prev`, `dup`, `ind` and the pattern over all heads of the model is below `max_se`: the table is then of so many
    sequences. In SmolLM2-135M 25 suffice, and scores differ from the scores of 200 by at most .022. Errors after such a
    stop are too small for heads that fire in few sequences: a head that attends fully in 2 % of them reads .010 in the
    mean, and .02 lies more than two errors away in 61 % of the seeds (docs/cautions.md has more rows).

    With `null_draws` each score also gets a p: how often a head that reads its keys from random directions reaches it.
    W_K becomes O W_K, O a Haar-random rotation of the residual stream, and all else stays. Score and draws are compared
    on the first 16 sequences (of prompts beyond 256 tokens, on as many as have 4,096 tokens together). P of many heads
    need a correction, `tls.stats.benjamini_hochberg`.

    For an encoder, whose queries see later keys, there is also the mass on the token after the query (`next`), on the
    same queries. `ind` has no meaning there and is NaN: what follows a token is seen, not remembered.

        tls.detect_heads(model, pattern=lambda row: torch.eye(len(row)).roll(2, 0).tril())  # two tokens back

    Args:
        model: a TransformerBridge or HookedTransformer.
        n_sequences: sequences drawn, at most; standard errors are over those that are run.
        max_se: the standard error below which no more sequences are run; None runs all. With `prompts` all are run.
        segment_length: L, at most (n_ctx - 1) // 2.
        prompts: in place of the drawn sequences, in any form that `Task` takes: strings, token ids, lists of unequal
            length, or a tokenizer's batch with its `attention_mask`. Padding is never counted. Equal prompts are one
            observation, with a warning: means are over all, errors over the distinct ones.
        pattern: keys that queries are scored on: weights, or 0 and 1, [pos, pos] for all sequences or [sequences, pos,
            pos], where positions count from the first real token; or a function from the token ids of a sequence,
            [pos], to [pos, pos]; or the name of one, on queries from position 2 on: `"previous_token"`, `"next_token"`
            (encoders), `"duplicate"`, `"induction"`, `"first_token"`, `"local"` (2 to 8 tokens back), `"self"`.
        sinks: "found" adds columns without all sinks of the layer, which a run of its own finds first
            (`tls.heads.attention_sinks`). It needs `prompts` that are no repeated segments.
        null_draws: draws of the null, 0 for none. The smallest possible p is 1 / (null_draws + 1), `attrs["p_floor"]`.
            Memory does not grow with them; a draw takes about as long as the model's attention on 16 sequences.
        seed: of the draw, on the CPU: the same on every device and for every batch size. Also of the null.

    Returns:
        DataFrame sorted by layer and head. Columns: `layer, head, name, prev, prev_se, prev_p?, dup, dup_se, dup_p?,
        ind, ind_se, ind_p?, prev_first, prev_first_se, prev_first_p?, next?, next_se?, next_p?, pattern?, pattern_se?,
        pattern_p?`; on other prompts also `self` and the columns on how widely a head attends, which
        `tls.tables.describe_table("detect_heads.prompts")` lists. A p is NaN where none of the compared sequences
        counts. `attrs` hold where the model came from, with hashes of its weights, L, `max_se`, the number of sequences
        that were run, the opening token, `reliability`, the rank correlation over heads of each score between even and
        odd distinct sequences, `user_hooks`, as in `analyze_heads`, and `chance`: what uniform attention to the keys
        that a query sees would score. It is one number, or a dictionary by score: on other prompts, with a pattern,
        and where a layer's window is shorter than the sequences. A score whose chance differs between layers has a
        dictionary by layer there, `{"L0": .13, "L1": .05}`. With a dictionary `n_counted` says how many sequences have
        a query for a score. With a null also `null_draws`, `p_floor`, the smallest possible p, and
        `null_sequences`, how many are compared; with `sinks` also `sinks`, as in `attention_sinks`.

    Raises:
        ValueError: fewer than two sequences are drawn, a `max_se` that is not above 0, or a pattern of another shape,
            without a mark, or with a key after its query; `sinks` on repeated segments, or where no key is decided.
        TypeError, ValueError: prompts that cannot be read (see `Task`), or a pattern that is no matrix.
        UnsupportedArchitecture: the model exposes no attention pattern; with `null_draws`, a layer cannot be read.
        ScoreMismatch: with `null_draws`, a layer's weights do not give its pattern (sinks, hooks, an open `ablate`).

    What it does not establish: on random sequences, what the head does on text; on any, that the model needs it, or
    that the head looks for the token and not for its content. Errors say nothing of other prompts or another seed of
    the model. A small p does not say that the score is large, and the chance level of `prev_first` differs from that
    of `prev`, since its queries see fewer keys.
    """
    null_draws = counted(null_draws, 0, "null_draws is how many draws the null has, 0 for no null")
    require_max_se(max_se)
    without_sinks = asked_for_sinks(sinks)
    with measured(model) as view:
        if prompts is None:
            repeated = repeated_sequences(view, n_sequences=n_sequences, segment_length=segment_length, seed=seed)
            sequences, distinct = even_rows(repeated), None
        else:
            max_se = None
            prompts = given_prompts(prompts)  # a generator can be read once
            repeated = repeated_ids(prompts)
            sequences = packed_prompts(view, prompts) if repeated is None else packed_rows(view, repeated)
            numbers = distinct_rows([sequences], [()] * len(sequences.tokens))
            equal = equality_notes(numbers)
            for note in equal:
                warn_caller(note.message)
            sequences = replace(sequences, notes=(*sequences.notes, *equal))
            distinct = numbers if equal else None
        found = None
        if without_sinks:
            if repeated is not None:
                raise ValueError(
                    'sinks="found" adds columns on how widely heads attend to prompts of your own, and repeated '
                    "segments [BOS, r, r] have no such columns: give prompts= of another kind, or leave sinks out"
                )
            found = found_sinks(view, sequences, view.layers, sequences_at_once(view, sequences.tokens.shape[1]))
            found.require(view.layers)
        table = measured_detectors(
            view,
            sequences,
            on_prompts=repeated is None,
            sinks=found,
            max_se=max_se,
            distinct=distinct,
            pattern=pattern,
            null_draws=null_draws,
            seed=seed,
        )
        table.attrs = {**view.origin(), **table.attrs}
        return table


def measured_detectors(
    view: AttentionView,
    sequences: PackedTokens,
    *,
    on_prompts: bool = False,
    sinks: Sinks | None = None,
    max_se: float | None = None,
    distinct: Int[np.ndarray, "sequences"] | None = None,
    pattern: Pattern | None = None,
    null_draws: int = 0,
    seed: int,
) -> pd.DataFrame:
    """Return the table of `detect_heads` without where the model came from. `sequences` repeat unless `on_prompts`.

    With `sinks` of these prompts there are columns without them. `distinct` has one number for equal sequences, which
    are one observation; None: all are observations.
    """
    tokens = sequences.tokens
    copies = None if distinct is None else torch.tensor(np.bincount(distinct)[distinct]).double()
    halves = torch.arange(len(tokens)) if distinct is None else torch.tensor(distinct)  # by even and odd numbers
    length = None if on_prompts else segment_length_of(tokens)
    attrs: dict[str, Any] = {"batch": sequences_at_once(view, tokens.shape[1])}
    if length is None:
        no_key = torch.zeros(tokens.shape[1], tokens.shape[1])
        patterns: dict[str, Any] = {
            name: one.pattern if view.causal or one.in_encoders else no_key for name, one in DETECTORS.items()
        }
        patterns["self"] = "self"
        patterns |= {} if view.causal else {"next": "next_token"}
    else:
        attrs |= {"max_se": max_se, "segment_length": length, "bos": int(tokens[0, 0]), "seed": seed}
        patterns = {**repeated_marks(length, view.causal)}
    patterns |= {} if pattern is None else {"pattern": pattern}
    names, seen = [*patterns], SeenKeys(view, tokens.shape[1])
    marks = Marks(sequences, [*patterns.values()], seen, causal=view.causal)
    if max_se is None:
        stop: tuple[float, list[int]] | None = None
    else:  # an encoder has no key for `ind`, and so never an error
        stop = (
            max_se,
            [
                place
                for place, name in enumerate(names)
                if name == "pattern" or (name in DETECTORS and bool(patterns[name].any()))
            ],
        )
    spread = Spread(view, sequences, copies, sinks) if length is None else None
    with bar(len(sequences.tokens), "detectors", "seq") as shown:
        statistics = _statistics(view, sequences, marks.scorer, shown.update, copies, halves % 2 == 1, stop, spread)
    attrs = {"n_sequences": statistics.n_run} | attrs
    if pattern is not None and not statistics.n_counted[-1]:
        raise ValueError("pattern marks no key of any sequence")
    uniform = torch.cat(marks.uniform, dim=-1).sum(-1) / statistics.n_counted
    chance: Any = {name: seen.by_layer(level) for name, level in zip(names, uniform.T.tolist(), strict=True)}
    if length is not None:
        chance = _chance_of_detectors(length, seen) | ({} if pattern is None else {"pattern": chance["pattern"]})
        first = chance["prev"]
        if isinstance(first, float) and all(level == first for level in chance.values()) and pattern is None:
            chance = first  # one number for all detectors and layers
    if spread is not None:
        chance |= spread.uniform(seen)
    if isinstance(chance, dict):
        attrs["n_counted"] = dict(zip(names, statistics.n_counted.long().tolist(), strict=True))
    pvalues: Any = [None] * len(names)
    if null_draws:  # after `marks.uniform` has been read, as scoring adds to it
        n_compared = min(len(tokens), NULL_SEQUENCES, max(1, _NULL_TOKENS // tokens.shape[1]))
        attrs |= {"seed": seed, "null_draws": null_draws, "null_sequences": n_compared}
        attrs |= {"p_floor": draws_floor(null_draws)}
        scored = marks.scorer(slice(0, n_compared))
        with bar(null_draws * len(view.layers), "detectors, null", "draw") as shown:
            pvalues = rotated_key_pvalues(
                view, tokens[:n_compared], *scored, draws=null_draws, seed=seed, advance=shown.update
            )
    scores: dict[str, Any] = {"layer": statistics.layer, "head": statistics.head}
    for name, mean, error, pvalue in zip(names, statistics.mean, statistics.error, pvalues, strict=True):
        scores |= {name: mean, f"{name}_se": error} | ({} if pvalue is None else {f"{name}_p": pvalue})
    scores |= {} if spread is None else spread.measured()
    attrs |= {"chance": chance, "reliability": _reliability(statistics.halves, names)}
    attrs |= {key: value for key, value in view.source.items() if key == "user_hooks"} | sequences.noted
    attrs |= {} if sinks is None else sinks.noted
    return (DETECT_HEADS if length is not None else DETECT_HEADS_ON_PROMPTS).frame(scores, attrs)


def _chance_of_detectors(length: int, seen: SeenKeys) -> dict[str, ByLayer]:
    """Return what uniform attention puts on the one key of each detector, averaged over the copy of L tokens."""
    chance: dict[str, ByLayer] = {}
    for name in DETECTORS:
        on_key = [one[detector_pairs(name, length)] for one in seen.uniform().numpy()]
        # A mean of equal numbers, as in an encoder, can differ from them in the last bit.
        chance[name] = seen.by_layer([float(one.mean() if np.ptp(one) else one[0]) for one in on_key])
    return chance


def _reliability(halves: Float64[np.ndarray, "2 scores heads"], names: Sequence[str]) -> dict[str, float | None]:
    """Return the Spearman correlation over heads between scores of even and of odd sequences, per detector.

    It concerns the order of all heads, most of which are near chance. None for fewer than three heads or equal scores.
    """
    reliability: dict[str, float | None] = {}
    for name, (even, odd) in zip(names, halves.swapaxes(0, 1), strict=False):
        if name == "prev_first":
            continue
        varies = len(even) > 2 and np.ptp(even) > 0 and np.ptp(odd) > 0
        reliability[name] = float(pd.Series(even).corr(pd.Series(odd), method="spearman")) if varies else None
    return reliability


class _Statistics(NamedTuple):
    """Scores of all heads over the sequences that count, of which there are `n_counted` for each score."""

    layer: Int[np.ndarray, "heads"]
    head: Int[np.ndarray, "heads"]
    mean: Float64[np.ndarray, "scores heads"]
    error: Float64[np.ndarray, "scores heads"]
    halves: Float64[np.ndarray, "2 scores heads"]
    n_counted: Float64[Tensor, "scores"]
    n_run: int


def sequences_at_once(view: AttentionView, width: int) -> int:
    """Return how many sequences of a width run together where attention alone is read."""
    by_tokens = 2 * batch_on(view.device).tokens // width  # no logits are made
    return max(1, min(BATCH, by_tokens, rows_of_scores(view, width)))


def _statistics(
    view: AttentionView,
    sequences: PackedTokens,
    scorer: Scorer,
    advance: Callable[[int], Any],
    copies: Float64[Tensor, "sequences"] | None,
    in_odd: Bool[Tensor, "sequences"],
    stop: tuple[float, list[int]] | None,
    spread: Spread | None,
) -> _Statistics:
    """Return mean and standard error of each score, and the means over even and over odd sequences (`in_odd`).

    `scorer` gives the scores of a batch, which are 0 where a sequence does not count, and which do. Hooks reduce the
    patterns, so that none is stored. `copies` says how many sequences are equal to each, itself among them: these are
    one observation, and the error is as in `tasks.metric_value.standard_error`. None: all are observations. `stop`:
    the standard error below which no more sequences are run, and the scores whose errors have to be below it. `spread`
    reads the same patterns.
    """
    of_batch: dict[int, Tensor] = {}  # by layer, [scores, batch, heads]
    reduce_batch: Reduce

    def reduce(layer: int, pattern: Tensor, hook: Any) -> None:
        of_batch[layer] = reduce_batch(pattern)
        if spread is not None:
            spread.read(layer, pattern, rows)

    hooks = [(view.hook_names(layer)["pattern"], partial(reduce, layer)) for layer in view.layers]
    n_sequences, width = sequences.tokens.shape
    at_once = sequences_at_once(view, width)
    by_half = square = sizes = torch.zeros(1, dtype=torch.float64)  # [2 halves, scores, heads], but sizes without heads
    by_row: list[Any] = [0.0] * 4  # scores and their squares times copies, copies, and distinct rows
    n_heads: list[int] = []
    # The errors are looked at after FIRST_STOP sequences, then each time that their number has doubled, so that a run
    # which stops early has looked only a few times.
    next_look = n_sequences if stop is None else min(FIRST_STOP, n_sequences)
    n_run = 0
    while True:
        rows = slice(n_run, min(n_run + at_once, next_look))
        odd = in_odd[rows]
        reduce_batch, counts = scorer(rows)
        run_until(view, sequences.tokens[rows], hooks, last=hooks[-1][0])
        for layer in view.layers:
            # `run_until` has seen the last layer's pattern alone: an earlier layer can hand on none.
            if layer not in of_batch:
                raise UnsupportedArchitecture(
                    f"layer {layer}: the attention never returned its pattern; "
                    'load the model with attn_implementation="eager"'
                )
        n_heads = [of_batch[layer].shape[-1] for layer in view.layers]
        if spread is not None:
            spread.end_batch(rows)
        scores = torch.cat([of_batch.pop(layer) for layer in view.layers], dim=-1)
        # Even and odd sequences apart: their difference is the reliability of a score.
        by_half = by_half + torch.stack([scores[:, half].sum(1) for half in (~odd, odd)])
        sizes = sizes + torch.stack([counts[:, half].sum(1) for half in (~odd, odd)])
        square = square + scores.square().sum(1)
        if copies is not None:
            times, counted = copies[rows], counts.double()
            weighted = [(power * times[:, None]).sum(1) for power in (scores, scores.square())]
            by_row = [
                sum(pair) for pair in zip(by_row, [*weighted, counted @ times, counted @ (1 / times)], strict=True)
            ]
        n_run = rows.stop
        advance(rows.stop - rows.start)
        if n_run < next_look:
            continue
        n_counted = sizes.sum(0)
        count = n_counted[:, None]
        mean = by_half.sum(0) / count
        variance = (square / count - mean.square()).clamp_min(0) * count / (count - 1)
        if n_run == n_sequences or (stop is not None and bool(((variance / count)[stop[1]] < stop[0] ** 2).all())):
            break
        next_look = min(2 * next_look, n_sequences)
    # Equal sequences are one observation: the variance is over distinct ones, each weighted by its number of copies.
    if copies is not None:
        first, second, times, n_distinct = by_row[0], by_row[1], by_row[2][:, None], by_row[3].round()[:, None]
        squares = second - 2 * mean * first + mean.square() * times
        variance = (squares.clamp_min(0) / count * n_distinct / (n_distinct - 1)).where(n_distinct > 1, torch.nan)
    return _Statistics(
        np.repeat(view.layers, n_heads),
        np.concatenate([np.arange(n) for n in n_heads]),
        mean.numpy(),
        (variance / count).sqrt().numpy(),
        (by_half / sizes[:, :, None]).numpy(),
        n_counted,
        n_run,
    )


def require_max_se(max_se: float | None) -> None:
    """Raise ValueError for a standard error that no sequence can reach."""
    if max_se is not None and not max_se > 0:
        raise ValueError(f"max_se is a standard error above 0, or None to run all n_sequences; found {max_se!r}")
