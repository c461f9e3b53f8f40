"""`detect_heads`: attention of each head to the previous token, an earlier copy, its successor, and other marked keys.

Default sequences are [BOS, r, r]: a random segment r and its copy; the queries are the tokens of the copy. The scores
come from "Fingerprint, Not Blueprint" (FP), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.errors import shown, warn_caller
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.heads.detectors.chance import ByLayer, SeenKeys
from tlspectral.heads.detectors.rotated_keys import rotated_key_pvalues
from tlspectral.heads.detectors.sinks import Sinks, asked_for_sinks, found_sinks
from tlspectral.heads.detectors.spread import Spread
from tlspectral.heads.detectors.targets import Marks, Reduce, Scorer
from tlspectral.models.hooking.strips import Strip, strips
from tlspectral.models.reading import measured
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, batch_on, even_rows, rows_of_scores
from tlspectral.models.running.given import given_prompts
from tlspectral.models.running.long_prompts import STRIP, strips_for, strips_noted
from tlspectral.models.running.passes import read_patterns
from tlspectral.models.running.prompts import distinct_rows, equality_notes, packed_prompts, packed_rows
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
"""Number of sequences after which errors are first compared with `max_se`; then after twice as many, and so on."""
NULL_SEQUENCES, _NULL_TOKENS = 16, 2**12
"""Most sequences, and most tokens in them, on which scores are compared with the null."""

Pattern = Callable[[Tensor], Any] | Any
"""Keys that count for a query: weights [pos, pos], a function from a prompt's ids to such weights, or a name."""


def _scored(name: str, meaning: str, unit: str = "attention probability") -> tuple[Column, ...]:
    """Return three `Column`s (name, unit and meaning) for the score `name`: `<name>`, `<name>_se` and `<name>_p`.

    They are the mean, described by the text `meaning` and its `unit`, its standard error, and p.
    """
    return columns(f"""
        {name}    | {unit}      | {meaning}
        {name}_se | {unit}      | Its standard error over distinct sequences; NaN below two that count.
        {name}_p? | probability | Share of draws of the null, the head itself among them, that reach {name}.
    """)


def _at_times(name: str, meaning: str, unit: str = "attention probability") -> tuple[Column, ...]:
    """Return three `Column`s (name, unit and meaning) for a score `name` that only some tables have: `<name>`,
    `<name>_se` and `<name>_p`.

    They are the mean, described by the text `meaning` and its `unit`, its standard error, and p.
    """
    return tuple(replace(column, always=False) for column in _scored(name, meaning, unit))


_LARGEST = "pattern_largest"
_PATTERN = (
    *_at_times("pattern", "Mean weighted attention to the keys marked by `pattern=`. NaN where none counts."),
    *_at_times(
        _LARGEST,
        "Share of the queries with a marked key whose largest attention is on a marked key; n equally large keys count "
        "1 / n each. On the answer in a needle it is the retrieval score of Wu et al. (2404.15574).",
        "share",
    ),
)
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


@checked_settings
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
    """Measure each head's attention to the previous token, an earlier copy of the token, and the token after that copy.

    Use it to find previous-token, duplicate-token and induction heads, on random sequences or on prompts of your own.

    >>> import tlspectral as tls
    >>> scores = tls.detect_heads(tls.load_model("tiny-rope"), n_sequences=8)
    >>> scores.loc[scores["prev"].idxmax(), "name"]
    'L0H3'

    Random sequences are [BOS, r, r], with L tokens in r. For a query at position p of the copy, `prev` is attention to
    p - 1, `dup` to p - L (same token), `ind` to p - L + 1 (its successor).

    Args:
        model: a TransformerBridge or HookedTransformer. Hooks on it stay in force.
        n_sequences: number of random sequences, at most.
        max_se: stop after 25, 50, 100, ... sequences once all standard errors are below it. None: run all.
        segment_length: L, at most (n_ctx - 1) // 2.
        prompts: in place of random sequences: strings, token ids [batch, pos], lists of ids, or a tokenizer's batch.
            All are run; padding and repeated prompts do not count.
        pattern: keys to score: "previous_token", "next_token", "duplicate", "induction", "first_token", "local" (2 to 8
            back) or "self"; weights [pos, pos] or [sequences, pos, pos]; or a function from token ids [pos] to weights.
        sinks: "found" adds columns without the layer's attention sinks (`tls.heads.attention_sinks`). Needs `prompts`.
        null_draws: random heads per layer for the `_p` columns. Default: 0, no p.
        seed: seed of the random sequences and of the null.

    Returns:
        DataFrame, a row per head. Columns (`?`: not in every table): `layer, head, name, prev, prev_se, prev_p?, dup,
        dup_se, dup_p?, ind, ind_se, ind_p?, prev_first, prev_first_se, prev_first_p?, next?, next_se?, next_p?,
        pattern?, pattern_se?, pattern_p?, pattern_largest?, pattern_largest_se?, pattern_largest_p?`. Scores are mean
        attention probabilities (`prev_first`: `prev` in the first r; `pattern_largest`: share of queries whose largest
        attention is on a key of the pattern); `_se` is the standard error over sequences; `_p` the share of random
        heads that reach the score. `tls.tables.describe_table("detect_heads.prompts")` lists more for `prompts`.

    Raises:
        ValueError, TypeError: prompts or a pattern that cannot be read, fewer than two sequences, `max_se` not above 0,
            or `sinks` without prompts that have a key to judge.
        UnsupportedArchitecture: the model exposes no attention pattern, or, for a null, a layer cannot be read.
        ScoreMismatch: for a null: a layer's weights do not give its attention (learned sinks, hooks, an open `ablate`).

    Not established: what the head does on other text, or that the model needs it. More: docs/detectors.md.
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
        layer_sinks = None
        if without_sinks:
            if repeated is not None:
                raise ValueError(
                    'sinks="found" needs prompts of your own, not repeated segments [BOS, r, r]: give text or other '
                    "token ids as prompts=, or leave sinks out"
                )
            layer_sinks = found_sinks(view, sequences, view.layers, sequences_at_once(view, sequences.tokens.shape[1]))
            layer_sinks.require(view.layers)
        table = measured_detectors(
            view,
            sequences,
            on_prompts=repeated is None,
            sinks=layer_sinks,
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
    """Return the table of `detect_heads`, without the model's origin in the attrs: a row per head with its mean
    attention to marked keys.

    `view` is the open model, which is run. `sequences` are repeated segments [BOS, r, r], or prompts if `on_prompts`.
    `sinks` are the attention sinks of these prompts. `max_se` is the standard error at which the run stops; None: all
    are run. `distinct` has one number for equal sequences, which count as one observation; None: all differ. `pattern`
    marks more keys (a name, weights, or a function of token ids). `null_draws` is the number of random heads for p; 0:
    no p. `seed` is the seed of these draws.
    """
    tokens = sequences.tokens
    copies = None if distinct is None else torch.tensor(np.bincount(distinct)[distinct]).double()
    halves = torch.arange(len(tokens)) if distinct is None else torch.tensor(distinct)  # by even and odd numbers
    length = None if on_prompts else segment_length_of(tokens)
    attrs: dict[str, Any] = {"batch": sequences_at_once(view, tokens.shape[1])}
    if length is None:
        patterns: dict[str, Any] = {
            name: detector.pattern
            if view.causal or detector.in_encoders
            else lambda tokens: torch.zeros(2 * [len(tokens)])
            for name, detector in DETECTORS.items()
        }
        patterns["self"] = "self"
        patterns |= {} if view.causal else {"next": "next_token"}
    else:
        attrs |= {"max_se": max_se, "segment_length": length, "bos": int(tokens[0, 0]), "seed": seed}
        patterns = {**repeated_marks(length, view.causal)}
    patterns |= {} if pattern is None else {"pattern": pattern}
    names, seen = [*patterns, *([] if pattern is None else [_LARGEST])], SeenKeys(view, tokens.shape[1])
    at_once = strips_for(view, tokens.shape[1])
    marks = Marks(sequences, [*patterns.values()], seen, at_once, causal=view.causal, largest=pattern is not None)
    attrs |= strips_noted(at_once)
    if null_draws and len(at_once) > 1:
        raise ValueError(
            f"null_draws={null_draws} compares whole matrices of queries and keys, and a prompt has {tokens.shape[1]} "
            "tokens: leave null_draws out, or give shorter prompts"
        )
    if max_se is None:
        stop: tuple[float, list[int]] | None = None
    else:  # without `ind` of an encoder, which has no key and so no error
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
        raise ValueError("pattern= gives no key a weight in any sequence: give weights that are not all 0")
    uniform = torch.cat(marks.uniform, dim=-1).sum(-1) / statistics.n_counted
    chance: Any = {name: seen.by_layer(level) for name, level in zip(names, uniform.T.tolist(), strict=True)}
    if length is not None:
        of_pattern = {} if pattern is None else {name: chance[name] for name in ("pattern", _LARGEST)}
        chance = _chance_of_detectors(length, seen) | of_pattern
        first = chance["prev"]
        if isinstance(first, float) and all(level == first for level in chance.values()) and pattern is None:
            chance = first  # one number for all scores and layers
    if spread is not None:
        chance |= spread.uniform(seen)
    if isinstance(chance, dict):
        attrs["n_counted"] = dict(zip(names, statistics.n_counted.long().tolist(), strict=True))
    pvalues: Any = [None] * len(names)
    if null_draws:  # after `marks.uniform` was read, because the scorer adds to it
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
    """Return a dict from detector ("prev", "dup", "ind") to its chance: the mean uniform attention on the detector's
    key.

    The mean is over the queries of a copy of `length` tokens; `seen` has the keys that each query sees. A value is one
    number, or a dict by layer if layers differ.
    """
    chance: dict[str, ByLayer] = {}
    for name in DETECTORS:
        queries, keys = map(np.array, detector_pairs(name, length))
        by_strip = [
            [attention[queries[inside] - strip.start, keys[inside]] for attention in seen.uniform(strip).numpy()]
            for strip in strips(2 * length + 1, STRIP)
            for inside in [(queries >= strip.start) & (queries < strip.stop)]
        ]
        on_key = [np.concatenate(rows) for rows in zip(*by_strip, strict=True)]
        # A mean of equal numbers, as in an encoder, can differ from them in the last bit.
        chance[name] = seen.by_layer(
            [float(attention.mean() if np.ptp(attention) else attention[0]) for attention in on_key]
        )
    return chance


def _reliability(halves: Float64[np.ndarray, "2 scores heads"], names: Sequence[str]) -> dict[str, float | None]:
    """Return a dict from score to its reliability: the Spearman correlation, over heads, of the means of even and odd
    sequences.

    `halves` has these means, `names` the scores. The number concerns the order of all heads; most heads are near
    chance. None for fewer than three heads or equal scores.
    """
    reliability: dict[str, float | None] = {}
    for name, (even, odd) in zip(names, halves.swapaxes(0, 1), strict=False):
        if name == "prev_first":
            continue
        varies = len(even) > 2 and np.ptp(even) > 0 and np.ptp(odd) > 0
        reliability[name] = float(pd.Series(even).corr(pd.Series(odd), method="spearman")) if varies else None
    return reliability


class _Statistics(NamedTuple):
    """Scores of all heads. Arrays have one column per head.

    Attributes:
        layer, head: the heads.
        mean, error: mean of each score over the sequences that count, and its standard error.
        halves: means over even and over odd sequences.
        n_counted: number of sequences that count for each score.
        n_run: number of sequences that were run.
    """

    layer: Int[np.ndarray, "heads"]
    head: Int[np.ndarray, "heads"]
    mean: Float64[np.ndarray, "scores heads"]
    error: Float64[np.ndarray, "scores heads"]
    halves: Float64[np.ndarray, "2 scores heads"]
    n_counted: Float64[Tensor, "scores"]
    n_run: int


def sequences_at_once(view: AttentionView, width: int) -> int:
    """Return how many sequences of `width` tokens the model in `view` runs in one batch when only attention is read."""
    by_tokens = 2 * batch_on(view.device).tokens // width  # twice as many, because no logits are computed
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
    """Run the sequences through the model in `view`; return the scores of all heads: means, standard errors, and
    numbers of sequences.

    Attention is reduced in hooks and never stored. `scorer(rows)` returns a function from attention to scores, and a
    mask of the sequences that count. `advance` is called with the number of sequences done. `copies`: number of
    sequences equal to each (itself included), which count as one observation; None: all differ. `in_odd` marks the odd
    half, for reliability. `stop`: the standard error at which to stop, and the indices of the scores that must reach
    it; None: run all. `spread` gets the same attention and adds its own sums.
    """
    of_batch: dict[int, Tensor] = {}  # by layer, [scores, batch, heads]
    reduce_batch: Reduce

    def reduce(layer: int, pattern: Tensor, strip: Strip) -> None:
        scores = reduce_batch(pattern, strip)
        of_batch[layer] = scores if strip.is_first else of_batch[layer] + scores
        if spread is not None:
            spread.read(layer, pattern, strip, rows)

    n_sequences, width = sequences.tokens.shape
    at_once = sequences_at_once(view, width)
    by_half = square = sizes = torch.zeros(1, dtype=torch.float64)  # [2 halves, scores, heads], but sizes without heads
    by_row: list[Any] = [0.0] * 4  # scores and their squares times copies, copies, and distinct rows
    n_heads: list[int] = []
    # Errors are compared with `max_se` after FIRST_STOP sequences and after each doubling: few looks, because each look
    # is one more chance to stop too early.
    next_look = n_sequences if stop is None else min(FIRST_STOP, n_sequences)
    n_run = 0
    while True:
        rows = slice(n_run, min(n_run + at_once, next_look))
        odd = in_odd[rows]
        reduce_batch, counts = scorer(rows)
        read_patterns(view, sequences.tokens[rows], view.layers, reduce)
        n_heads = [of_batch[layer].shape[-1] for layer in view.layers]
        if spread is not None:
            spread.end_batch(rows)
        scores = torch.cat([of_batch.pop(layer) for layer in view.layers], dim=-1)
        # Even and odd sequences apart, for the reliability of a score.
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
    # Equal sequences are one observation: the variance is over distinct sequences, weighted by their copies.
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
    """Raise ValueError if `max_se` is a number that is not above 0."""
    if max_se is not None and not max_se > 0:
        raise ValueError(
            f"max_se={shown(max_se)}: give a standard error above 0, such as 0.02, or None to run all n_sequences"
        )
