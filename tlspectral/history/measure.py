"""The measurements of one checkpoint: the head table, the in-context score, K-composition of pairs of heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from tlspectral.composition import k_composition
from tlspectral.errors import BadHead
from tlspectral.heads import analyze_heads
from tlspectral.history.in_context import in_context_score
from tlspectral.history.population import PERCENTILES, within_model_percentile
from tlspectral.history.result import Head
from tlspectral.models.attention import AttentionView
from tlspectral.models.loading.source import Source
from tlspectral.models.opening import open_layers
from tlspectral.tasks import Task, evaluate

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers

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
    opened: AttentionView | Source,
    *,
    pairs: Sequence[tuple[Head, Head]],
    null_draws: int,
    null_dtype: Literal["float32", "float64"],
    detectors: bool,
    task: Task | None,
    n_jobs: int,
    seed: int,
) -> MeasuredStep:
    """Measure a model, or one that is read from its files; the arguments are those of `head_history`.

    `heads.attrs` are those of `analyze_heads`, with `in_context` (the columns of a summary, None without detectors),
    `score` (those of the task, None without one) and `shape` (numbers that have to be the same at all steps).

    Raises as `analyze_heads`, and BadHead for a pair that the model does not have.
    """
    model = opened.model if isinstance(opened, AttentionView) else opened
    score = None if task is None else evaluate(model, task)
    composition = _composition(model, pairs)  # first, so that a wrong head is refused before the null is computed
    heads = analyze_heads(
        model,
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
    heads.attrs["in_context"] = _in_context(model, seed) if detectors else None
    heads.attrs["score"] = None if score is None else {"value": score.value, "value_se": score.stderr}
    heads.attrs["shape"] = _shape(open_layers(model)) | {"heads": heads.groupby("layer").size().tolist()}
    return MeasuredStep(heads, composition)


def _shape(layers: "AttentionView | CheckpointLayers") -> dict[str, Any]:
    shape = {"layers": layers.n_layers, "d_model": layers.d_model}
    if isinstance(layers, AttentionView):
        rotary = [layers.rotary(index) is not None for index in range(layers.n_layers)]
        return shape | {"d_vocab": layers.d_vocab, "rotary": rotary}
    return shape | {"d_vocab": int(layers.config.vocab_size), "model_type": layers.config.model_type}


def _in_context(model: Any, seed: int) -> dict[str, float]:
    score = in_context_score(model, seed=seed)
    return {
        "icl_score": score.value,
        "icl_score_se": score.stderr,
        "first_copy_loss": score.first.value,
        "second_copy_loss": score.second.value,
    }


def _composition(model: Any, pairs: Sequence[tuple[Head, Head]]) -> pd.DataFrame:
    """Return the pairs' rows of `k_composition`, which is computed once per target."""
    rows: list[tuple[Any, ...]] = []
    by_target = {target: k_composition(model, target) for target in dict.fromkeys(target for _, target in pairs)}
    for source, target in pairs:
        table = by_target[target]
        source_rows = table.loc[(table["layer"] == source[0]) & (table["head"] == source[1])]
        if source_rows.empty:
            raise BadHead(f"layer {source[0]} of the model has no head {source[1]}")
        rows.append((*source, *target, *source_rows.iloc[0][["score", "chance", "rank"]]))
    return pd.DataFrame.from_records(rows, columns=list(_COMPOSITION)).astype(_COMPOSITION)
