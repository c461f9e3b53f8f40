"""The measurements of one checkpoint: the head table, the in-context score, K-composition of pairs of heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from tlspectral.composition import k_composition
from tlspectral.errors import BadHead
from tlspectral.heads import analyze_heads
from tlspectral.history.in_context import in_context_score
from tlspectral.history.population import PERCENTILES, within_model_percentile
from tlspectral.history.result import Head
from tlspectral.models.attention import AttentionView

_COMPOSITION = {
    "source_layer": np.int64,
    "source_head": np.int64,
    "target_layer": np.int64,
    "target_head": np.int64,
    "score": float,
    "chance": float,
    "rank": np.int64,
}


@dataclass(frozen=True)
class MeasuredStep:
    """The tables of one step, without the step; `heads.attrs` hold the other results."""

    heads: pd.DataFrame
    composition: pd.DataFrame


def measure_step(
    view: AttentionView,
    *,
    pairs: Sequence[tuple[Head, Head]],
    null_draws: int,
    null_dtype: Literal["float32", "float64"],
    detectors: bool,
    n_jobs: int,
    seed: int,
) -> MeasuredStep:
    """Measure a model; the arguments are those of `head_history`.

    `heads.attrs` are those of `analyze_heads`, with `in_context` (the columns of a summary, None without detectors) and
    `shape` (numbers that have to be the same at all steps).

    Raises as `analyze_heads`, and BadHead for a pair that the model does not have.
    """
    composition = _composition(view, pairs)  # first, so that a wrong head is refused before the null is computed
    heads = analyze_heads(
        view.model,
        null_draws=null_draws,
        null_dtype=null_dtype,
        null_blocks="fresh",
        detectors=detectors,
        n_jobs=n_jobs,
        seed=seed,
        show_progress=False,
    )
    for column in PERCENTILES:
        heads[f"{column}_pct"] = within_model_percentile(heads[column])
    heads.attrs["in_context"] = _in_context(view, seed) if detectors else None
    heads.attrs["shape"] = _shape(view)
    return MeasuredStep(heads, composition)


def _shape(view: AttentionView) -> dict[str, Any]:
    return {
        "layers": view.n_layers,
        "heads": [view.n_heads(layer) for layer in range(view.n_layers)],
        "d_model": view.d_model,
        "d_vocab": view.d_vocab,
        "rotary": [view.rotary(layer) is not None for layer in range(view.n_layers)],
    }


def _in_context(view: AttentionView, seed: int) -> dict[str, float]:
    score = in_context_score(view.model, seed=seed)
    return {
        "icl_score": score.value,
        "icl_score_se": score.stderr,
        "first_copy_loss": score.first.value,
        "second_copy_loss": score.second.value,
    }


def _composition(view: AttentionView, pairs: Sequence[tuple[Head, Head]]) -> pd.DataFrame:
    """Return the pairs' rows of `k_composition`, which is computed once per target."""
    rows: list[tuple[Any, ...]] = []
    by_target = {target: k_composition(view.model, target) for target in dict.fromkeys(target for _, target in pairs)}
    for source, target in pairs:
        table = by_target[target]
        source_rows = table.loc[(table["layer"] == source[0]) & (table["head"] == source[1])]
        if source_rows.empty:
            raise BadHead(f"layer {source[0]} of the model has no head {source[1]}")
        rows.append((*source, *target, *source_rows.iloc[0][["score", "chance", "rank"]]))
    return pd.DataFrame.from_records(rows, columns=list(_COMPOSITION)).astype(_COMPOSITION)
