"""`head_types`: what each head does, a row per head and type, beside a null of its own."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float64
from tqdm.auto import tqdm

from tlspectral.heads.types.attention import attention_scores, rotated_key_scores
from tlspectral.heads.types.columns import HEAD_TYPES
from tlspectral.heads.types.kinds import CANDIDATES, RELIABLE, TYPES, HeadType
from tlspectral.heads.types.retrieval import PROMPTS, permuted_targets, planted_facts, retrieved
from tlspectral.heads.types.sequences import TwoTexts, scored_keys, two_texts
from tlspectral.heads.types.suppression import suppression_scores
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.stats import benjamini_hochberg
from tlspectral.tables import named

NULL_ROWS, SUPPRESSION_ROWS = 1, 4
"""Sequences of each text for the null of patterns, and for copy suppression, which ranks the whole vocabulary."""


class _Measured(NamedTuple):
    """Scores of one type: each sequence of both texts (NaN where it has no query), and the null of their mean.

    `tested` is the mean that the null is of, where that is of fewer sequences.
    """

    first: Float64[np.ndarray, "sequences heads"]
    second: Float64[np.ndarray, "sequences heads"]
    tested: Float64[np.ndarray, "heads"]
    null: Float64[np.ndarray, "draws heads"]


def head_types(
    model: Any,
    *,
    texts: Sequence[str] | None = None,
    null_draws: int = 1000,
    seed: int = 0,
    show_progress: bool = True,
) -> pd.DataFrame:
    """Say what every head does: a score, a null and a decision for each of several known types of head.

        types = tls.head_types(model)
        types[types["claimed"]].groupby("type").size()

    Types are `previous_token` and `induction`, whose causal check passed, and `copy_suppression` and `retrieval`, which
    no head at hand could be checked for; docs/what_heads_do.md has their definitions, sources and checks, and the types
    that were dropped. The first two are patterns of attention of `detect_heads(pattern=)`, on repeated segments of text
    `[BOS, r, r]`: `previous_token` on the queries of the segment, `induction` on those of the copy. A head may have
    several types, or none.

    Nulls: W_K (patterns) or W_V (copy suppression) is rotated by a Haar-random rotation of the residual stream, which
    leaves a freshly initialised head as likely as it was; for retrieval, the fact that is asked for is exchanged for
    another of the same prompt.

    Args:
        model: a TransformerBridge or HookedTransformer.
        texts: two documents; each gives 16 segments of 64 tokens, and text around planted facts. None takes the two
            halves of the packaged book, and random ids for a model without tokenizer (two draws; planted facts are
            then random ids too).
        null_draws: draws of each null. p is no finer than 1 / (draws + 1), so that a model with few heads of any type
            needs more: with m rows, a single claim needs 20 m.
        seed: of random ids, planted facts and nulls.
        show_progress: a bar over draws of the null of attention, which take most of the time.

    Returns:
        DataFrame sorted by layer, head and type, `layer, head, name, type, score, stderr, chance, pvalue, qvalue,
        claimed`. Scores are NaN and nothing is claimed for `copy_suppression` where input and output vocabularies
        differ, and for `retrieval` where the context is under 75 tokens. `attrs` hold model and settings, `floors`,
        `causal_check` (by type, how removing its heads from SmolLM2-135M ended: "passed", or "unchecked" where no head
        was claimed), and `reliability`: by type, the Spearman correlation over heads between scores on the two texts.

    Raises:
        ScoreMismatch: a layer's pattern is not that of its weights (learned sinks, hooks or an `ablate` block).
        UnsupportedArchitecture: a layer that cannot be read.
        ValueError: texts that are not two, too short, or without a tokenizer; fewer than 1 draw.

    What it does not establish: that the model needs the head for this; `tlspectral.ablation.check_head_types` removes
    heads of a type and as many others.
    """
    return measured_types(model, TYPES, texts=texts, null_draws=null_draws, seed=seed, show_progress=show_progress)


def measured_types(
    model: Any,
    kinds: Sequence[HeadType],
    *,
    texts: Sequence[str] | None = None,
    null_draws: int = 1000,
    seed: int = 0,
    show_progress: bool = True,
) -> pd.DataFrame:
    """Return the table of `head_types` for some types, with the same arguments and errors."""
    if null_draws < 1:
        raise ValueError(f"null_draws is the number of draws of each null, from 1 up; found {null_draws}")
    view = attention_view(model)
    sequences = two_texts(view, texts, seed)
    with tqdm(total=null_draws, desc="head types", unit="draw", leave=False, disable=not show_progress) as bar:
        measured = _attention(view, sequences, kinds, null_draws, seed, bar)
    measured["copy_suppression"] = _suppression(view, sequences, null_draws, seed)
    measured["retrieval"] = _retrieval(view, sequences, null_draws, seed)
    n_heads = [view.n_heads(layer) for layer in range(view.n_layers)]
    layers = np.repeat(np.arange(view.n_layers), n_heads)
    heads = np.concatenate([np.arange(n) for n in n_heads])
    table = pd.concat([_rows(layers, heads, kind.name, measured[kind.name]) for kind in kinds])
    table["type"] = pd.Categorical(table["type"], [kind.name for kind in kinds], ordered=True)
    table = table.sort_values(["layer", "head", "type"], ignore_index=True).astype({"type": object})
    table["qvalue"] = benjamini_hochberg(table["pvalue"].to_numpy()).q
    reliability = {kind.name: _reliability(measured[kind.name]) for kind in kinds}
    table["claimed"] = claimed(table, reliability)
    table.attrs = {
        **view.origin(),
        "texts": sequences.read,
        "segment_length": sequences.length,
        "n_sequences": len(sequences.tokens),
        "null_draws": null_draws,
        "seed": seed,
        "floors": {kind.name: kind.floor for kind in kinds},
        "causal_check": {kind.name: kind.check for kind in kinds},
        "reliability": reliability,
    }
    return named(table, HEAD_TYPES)


def claimed(table: pd.DataFrame, reliability: Mapping[str, float | None]) -> pd.Series:
    """Return which rows are claimed: q below .05, an effect of the type's floor, and a type that is reliable."""
    floors = table["type"].map({kind.name: kind.floor for kind in CANDIDATES})
    reliable = table["type"].map(lambda kind: (reliability[kind] or 0.0) > RELIABLE)
    return (table["qvalue"] < 0.05) & (table["score"] - table["chance"] >= floors) & reliable


def _attention(
    view: AttentionView, sequences: TwoTexts, kinds: Sequence[HeadType], draws: int, seed: int, bar: Any
) -> dict[str, _Measured | None]:
    kinds = [kind for kind in kinds if kind.queries is not None]
    keys = scored_keys(sequences.tokens, sequences.length, kinds)
    scores = attention_scores(view, sequences.tokens, keys)
    scores[~keys.any(-1).any(-1).numpy()] = np.nan
    first, second = sequences.halves()
    rows = sequences.first_rows(NULL_ROWS)
    null = rotated_key_scores(
        view, sequences.tokens[rows], keys[:, rows], draws=draws, seed=seed, advance=partial(bar.update, 1)
    ).astype(float)
    tested = np.nan_to_num(scores[:, rows]).mean(1)
    return {
        kind.name: _Measured(scores[i, first], scores[i, second], tested[i], null[:, i]) for i, kind in enumerate(kinds)
    }


def _suppression(view: AttentionView, sequences: TwoTexts, draws: int, seed: int) -> _Measured | None:
    rows = sequences.first_rows(SUPPRESSION_ROWS)
    found = suppression_scores(view, sequences.tokens[rows, : sequences.length + 1], draws=draws, seed=seed)
    if found is None:
        return None
    scores, null = found
    return _Measured(scores[:SUPPRESSION_ROWS], scores[SUPPRESSION_ROWS:], _mean(scores), null)


def _retrieval(view: AttentionView, sequences: TwoTexts, draws: int, seed: int) -> _Measured | None:
    by_fact: list[np.ndarray] = []
    asked: list[np.ndarray] = []
    for index in range(2):
        text = None if sequences.texts is None else sequences.texts[index]
        facts = planted_facts(view, text, PROMPTS, seed=2 * seed + index)
        if facts is None:
            return None
        scores = retrieved(view, facts)
        by_fact.append(scores)
        asked.append(scores[np.arange(len(scores)), facts.asked.numpy()])
    null = permuted_targets(np.concatenate(by_fact), draws=draws, seed=seed)
    return _Measured(asked[0], asked[1], np.concatenate(asked).mean(0), null)


def _mean(scores: Float64[np.ndarray, "sequences heads"]) -> Float64[np.ndarray, "heads"]:
    """Return means over the sequences that have a value, NaN without any."""
    count = (~np.isnan(scores)).sum(0)
    return np.nansum(scores, 0) / np.where(count, count, np.nan)


def _rows(layers: np.ndarray, heads: np.ndarray, kind: str, measured: _Measured | None) -> pd.DataFrame:
    names = [f"L{layer}H{head}" for layer, head in zip(layers, heads, strict=True)]
    rows = pd.DataFrame({"layer": layers, "head": heads, "name": names, "type": kind})
    if measured is None:
        return rows.assign(score=np.nan, stderr=np.nan, chance=np.nan, pvalue=np.nan)
    scores = np.concatenate([measured.first, measured.second])
    mean = _mean(scores)
    count = (~np.isnan(scores)).sum(0)
    spread = np.sqrt(np.nansum((scores - mean) ** 2, 0) / np.where(count > 1, count - 1, np.nan))
    reached = (measured.null >= measured.tested).sum(0)
    return rows.assign(
        score=mean,
        stderr=spread / np.sqrt(count),
        chance=measured.null.mean(0),
        pvalue=np.where(np.isnan(mean), np.nan, (1 + reached) / (1 + len(measured.null))),
    )


def _reliability(measured: _Measured | None) -> float | None:
    """Return the Spearman correlation over heads between texts, None for fewer than three heads or equal scores."""
    if measured is None:
        return None
    first, second = pd.Series(_mean(measured.first)), pd.Series(_mean(measured.second))
    value = float(first.corr(second, method="spearman")) if min(first.nunique(), second.nunique()) > 2 else np.nan
    return None if np.isnan(value) else value
