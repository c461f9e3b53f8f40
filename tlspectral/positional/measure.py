"""`positional_symbolic`: whether a head's attention stays or follows the blocks when two blocks of a prompt swap."""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, get_args

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64

from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.layer import digest_of
from tlspectral.positional.block_weights import BlockReading, Mode, Swap, query_scores
from tlspectral.positional.columns import POSITIONAL_SYMBOLIC, POSITIONAL_SYMBOLIC_QUERIES
from tlspectral.positional.prompts import BlockPrompt, chosen_swaps
from tlspectral.tables import named, stacked
from tlspectral.tables.progress import bar

WITH_ERRORS = ("s_pos", "s_sym", "exclusion_index", "logit_std")
SCORES = (*WITH_ERRORS, "tau", "alpha_ess")


def positional_symbolic(
    model: Any,
    prompt: Any,
    *,
    mode: Mode = "prompt",
    tau: float | None = None,
    exclude_first_block: bool = True,
    per_frequency: bool = False,
    logit_scale: float | None = None,
    swaps: str | Iterable[Sequence[int]] | None = None,
    every_query: bool = False,
    seed: int = 0,
) -> pd.DataFrame:
    """Positional and symbolic score of every head, or of every rotary frequency of every head, on one prompt.

    Blocks i and j of the prompt swap, and the attention that its last token pays to the two slots is compared before
    and after: `s_pos` is high where it stays in the slots, `s_sym` where it follows the blocks. A slot is as long as
    the block in it, so a swap of blocks of unequal length shifts the tokens between them.

    There are two kinds of swap, and they answer different questions:

    * `mode="prompt"`: the words swap and the model runs again, the experiment of PS. Deeper layers see other keys.
    * `mode="key"`: the keys of one pass swap and are rotated to their new positions with the model's own cos and sin,
      Definition 2 of PS itself. Without rotary positions or ALiBi every head is symbolic here, with index exactly 0: a
      learned position is part of the key vector and moves with it. For such models use `"prompt"`.

    Both agree in the first layer of a model without learned positions. Hooks that are on the model stay in force, as
    long as they leave the scores to the layer's own queries and keys.

    Args:
        model: a TransformerBridge or HookedTransformer.
        prompt: a `BlockPrompt`; the query is the last token of the suffix. A list of prompts gives the mean of every
            column over them, without prompts in which a head has no score.
        mode: see above.
        tau: temperature of the weighting of swaps, in attention weight, or None: 0.1 times the largest |d_i - d_j| of
            that head (and frequency), which does not depend on how much attention the blocks get at all. PS gives no
            value, and results depend on it.
        exclude_first_block: leave out swaps that touch `blocks[0]`, which holds the attention sink of many prompts: the
            sink stays in the first slot under `"prompt"` and moves with its keys under `"key"`.
        per_frequency: rows per rotary pair instead, from the same passes. Logits are then `L_t` of PS appendix B.3:
            no softcap and no ALiBi, and non-rotary columns are in no row.
        logit_scale: factor on the products of queries and keys. None takes the model's own, for heads and frequencies
            alike, so that the logits of the frequencies sum to the rotary part of the head's. PS writes no 1/sqrt(d):
            `logit_scale=1.0` is its formula to the letter.
        swaps: `"kept"` (None), all pairs of the blocks that `exclude_first_block` keeps; `"all"`, every pair, those of
            the first block too; or pairs of block indices.
        every_query: score every token of one prompt's suffix as a query, as PS Definition 2 is for any: rows per
            `query`, its position in the prompt. The model reads the blocks once for all of them.
        seed: of the null of the correlation.

    Returns:
        DataFrame `layer, head[, frequency], s_pos, s_sym, exclusion_index, logit_std, tau, alpha_ess`, sorted.
        `exclusion_index` = sym / (pos + sym) of PS Theorem 1 over all visible tokens before the query: 0 symbolic, 1
        positional, independent of tau, swaps and scale. `logit_std`, of the logits of the same tokens: if it is small
        the softmax is flat and both scores are near 1. `alpha_ess`: effective number of swaps behind the scores.
        Scores are NaN for heads whose window shows none of the swaps.
        `attrs`: provenance, settings, `n_prompts`, and `correlation` of the two scores over heads (of the heads also
        for frequency rows) with its null, see `score_correlation`; its mean over the prompts of a list or over queries.

    Raises:
        TypeError: no model, or something else where a `BlockPrompt` or a list of them belongs.
        ValueError: an unknown mode; tau or logit_scale not positive and finite; swaps that do not exist or of which
            none is left; text that the tokenizer joins across blocks, before or after a swap; a prompt too long; ids
            outside the model's vocabulary; no prompt, or prompts whose rows differ.
        UnsupportedArchitecture: no attention pattern, or no rotary positions to take frequencies of.
        ScoreMismatch: a layer's attention is not the softmax of its captured queries and keys.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, sections 3.1 to 3.3, appendix B.3).

    What it does not establish: how the model solves the task, or what a head is for. A negative correlation of
    the two scores is largely geometry: with f and f' the angles of v and v', `s_pos^2 + s_sym^2 = 1 + sin 2f sin 2f'`
    at each swap. Compare it with the null, in which heads differ only in how often they follow. Both scores near 1
    mean that there was little attention to move.
    """
    view = attention_view(model)
    prompts = [prompt] if isinstance(prompt, BlockPrompt) else _prompts(prompt)
    require_settings(mode, tau=tau, logit_scale=logit_scale)
    chosen = [chosen_swaps(len(one.blocks), swaps, exclude_first_block=exclude_first_block) for one in prompts]
    tokenized = [tokenized_for(view, one, of_one, mode) for one, of_one in zip(prompts, chosen, strict=True)]
    if every_query and len(prompts) > 1:
        raise ValueError(f"every_query is for one prompt, found {len(prompts)}: positions of others are not theirs")
    readings = [
        BlockReading(view, _queries_of(one) if every_query else [one], of_one, mode, logit_scale, per_frequency)
        for one, of_one in zip(tokenized, chosen, strict=True)
    ]
    tables, correlations, ends = [], [], []
    total = sum(reading.n_steps for reading in readings)
    with bar(total, "swaps", "layer") as shown:
        for reading in readings:
            swaps_of = [reading.swaps] * len(reading.prompts)
            scores, of_queries = query_scores(reading.whole(shown.update), swaps_of, tau, seed)
            tables += [one["frequencies" if "frequencies" in one else "heads"] for one in scores]
            correlations += of_queries
            ends += [len(one.tokens()) - 1 for one in reading.prompts]
    if every_query:
        table = stacked(one.assign(query=end) for one, end in zip(tables, ends, strict=True))
        keys = [name for name in ("layer", "head", "frequency", "query") if name in table]
        table = table.reindex(columns=[*keys, *SCORES]).sort_values(keys, ignore_index=True)
    else:
        table = tables[0] if len(tables) == 1 else mean_over_prompts(tables)
    table.attrs = {
        **view.origin(),
        "mode": mode,
        "tau": tau,
        "exclude_first_block": exclude_first_block,
        "per_frequency": per_frequency,
        "logit_scale": logit_scale,
        "n_prompts": len(prompts),
        "n_swaps": _one_or_list([len(of_one) for of_one in chosen]),
        "n_blocks": _one_or_list([len(one.blocks) for one in prompts]),
        "n_tokens": _one_or_list([len(one.tokens()) for one in tokenized]),
        "tokens_sha256": digest_of([one.tokens() for one in tokenized]),
        "seed": seed,
        "correlation": _mean_correlation(correlations),
    }
    return named(table, POSITIONAL_SYMBOLIC_QUERIES if every_query else POSITIONAL_SYMBOLIC)


def tokenized_for(view: AttentionView, prompt: BlockPrompt, swaps: list[Swap], mode: Mode) -> BlockPrompt:
    """The prompt as token ids. Its text must keep its tokens under every swap. Raises as `positional_symbolic`."""
    tokenized = prompt.tokenized(view.model)
    if prompt.is_text and mode == "prompt":
        for i, j in swaps:
            prompt.swapped(i, j).require_borders(view.model.tokenizer, f" (after blocks {i} and {j} swap)")
    return tokenized


def require_settings(mode: str, **positive: float | None) -> None:
    """Refuse an unknown mode, and numbers that are not positive and finite; None is a default. Raises ValueError."""
    for name, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, or None for the default; found {value}")
    if mode not in get_args(Mode):
        raise ValueError(f"mode must be one of {', '.join(map(repr, get_args(Mode)))}; not {mode!r}")


def _prompts(given: Any) -> list[BlockPrompt]:
    """A list of prompts. Raises TypeError for anything else, ValueError for none."""
    prompts: list[Any] = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    strange = [type(one).__name__ for one in prompts if not isinstance(one, BlockPrompt)]
    if strange:
        raise TypeError(f"prompt is a tls.BlockPrompt(prefix, blocks, suffix) or a list of them; found {strange[0]}")
    if not prompts:
        raise ValueError("the list of prompts is empty: there is nothing to measure")
    return prompts


def _queries_of(prompt: BlockPrompt) -> list[BlockPrompt]:
    """The prompt cut off after each token of its suffix in turn: a causal model reads each query as in the whole."""
    suffix = torch.as_tensor(prompt.suffix)
    return [BlockPrompt(prompt.prefix, prompt.blocks, suffix[: end + 1]) for end in range(len(suffix))]


def _one_or_list(counts: list[int]) -> int | list[int]:
    return counts[0] if len(set(counts)) == 1 else counts


def _mean_correlation(correlations: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean of each number over prompts that have it; draws and heads are those of the first."""
    if len(correlations) == 1:
        return correlations[0]
    means = {}
    for name in ("pearson", "null_mean", "null_sd", "null_pct"):
        values = [one[name] for one in correlations if one[name] is not None]
        means[name] = float(np.mean(values)) if values else None
    return {**correlations[0], **means}


def mean_over_prompts(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Mean of every score over tables with the same rows in the same order. Raises ValueError where they differ."""
    names = _same_rows(tables)
    values = _mean(np.array([table[list(SCORES)].to_numpy(np.float64) for table in tables]), axis=0)
    return names.assign(**dict(zip(SCORES, values.T, strict=True)))


def over_draws(tables: list[list[pd.DataFrame]]) -> pd.DataFrame:
    """Mean over the queries of each draw, then mean and standard error over draws, row by row.

    The tables, one per draw and query, have the same rows in the same order. Scores have an `_se` (NaN for one draw)
    except for `tau` and `alpha_ess`. Queries and draws without a score are left out.
    """
    of_draws = [mean_over_prompts(draw) for draw in tables]
    names = _same_rows(of_draws)
    columns = {name: names[name].to_numpy() for name in names}
    for score in SCORES:
        by_draw = np.array([table[score].to_numpy() for table in of_draws])
        columns[score] = _mean(by_draw, axis=0)
        if score in WITH_ERRORS:
            columns[f"{score}_se"] = _standard_error(by_draw)
    return pd.DataFrame(columns)


def _same_rows(tables: list[pd.DataFrame]) -> pd.DataFrame:
    names = tables[0].drop(columns=list(SCORES))
    for table in tables:
        if not table[list(names)].equals(names):
            raise ValueError("these tables do not have the same rows, so they cannot be averaged")
    return names


def _mean(values: Float64[np.ndarray, "*shape"], axis: int) -> Float64[np.ndarray, "*rest"]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def _standard_error(by_draw: Float64[np.ndarray, "draws rows"]) -> Float64[np.ndarray, "rows"]:
    count = (~np.isnan(by_draw)).sum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Degrees of freedom", RuntimeWarning)
        return np.nanstd(by_draw, axis=0, ddof=1) / np.sqrt(np.maximum(count, 1))
