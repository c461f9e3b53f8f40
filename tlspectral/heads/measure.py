"""Columns that follow from the query-key factors of heads, and the spectra that the null is matched to."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from tlspectral.composition import EmbeddingMoments
from tlspectral.heads.extras import position_shares
from tlspectral.heads.null import LayerSpectra
from tlspectral.models.attention import AttentionLayer
from tlspectral.nulls import NULL_COLUMNS
from tlspectral.rotary import phase_metrics, phase_norms
from tlspectral.spectra import HeadMetrics, head_metrics
from tlspectral.tables import HEAD_COLUMNS


@dataclass(frozen=True)
class MeasuredHeads:
    """Columns of a layer's heads, or of some of them, and their spectra."""

    columns: dict[str, Any]
    spectra: LayerSpectra


def measure_heads(
    layer: AttentionLayer,
    index: int,
    *,
    moments: EmbeddingMoments | None,
    directions: Float64[Tensor, "d_model directions"] | None,
) -> MeasuredHeads:
    """Compute the spectral and phase columns of a layer's heads, under the layer's index in the model.

    The repeated keys are freed on return: only one layer's are in memory at a time. Without `moments`, `self_match` is
    NaN.
    """
    w_q, w_k = layer.operator_factors()
    metrics = head_metrics(w_q, w_k, storage_dtype=layer.storage_dtype, effective_dimension=layer.effective_dimension)
    columns = _identity_columns(layer, index) | _metric_columns(metrics) | _phase_columns(layer, w_q, w_k)
    columns["self_match"] = np.full(len(w_q), np.nan) if moments is None else moments.self_match(w_q, w_k)
    columns["position_share"] = position_shares(w_q, w_k, directions)
    observed = {name: getattr(metrics, name) for name in NULL_COLUMNS}
    heads = tuple(range(len(w_q)))
    spectra = LayerSpectra(index, heads, layer.effective_dimension, metrics.singular_values, observed)
    return MeasuredHeads(columns, spectra)


def selected(measured: MeasuredHeads, heads: Sequence[int]) -> MeasuredHeads:
    """Return some heads of a layer that was measured whole, in the order of `heads`."""
    rows, spectra = list(heads), measured.spectra
    return MeasuredHeads(
        {name: np.asarray(values)[rows] for name, values in measured.columns.items()},
        replace(
            spectra,
            heads=tuple(rows),
            singular_values=spectra.singular_values[rows],
            observed={name: values[rows] for name, values in spectra.observed.items()},
        ),
    )


def joined(groups: list[MeasuredHeads]) -> MeasuredHeads:
    """Join the heads of one layer, of which each key/value group was measured by itself."""
    names = groups[0].columns
    columns = {name: np.concatenate([np.asarray(group.columns[name]) for group in groups]) for name in names}
    group_sizes = [len(group.columns["head"]) for group in groups]
    columns["head"] = np.arange(sum(group_sizes))
    columns["kv_head"] = np.repeat(np.arange(len(groups)), group_sizes)
    spectra = [group.spectra for group in groups]
    index = spectra[0].layer
    columns["name"] = np.array([f"L{index}H{head}" for head in columns["head"]])
    whole = LayerSpectra(
        index,
        tuple(range(sum(group_sizes))),
        spectra[0].effective_dimension,
        np.concatenate([group_spectra.singular_values for group_spectra in spectra]),
        {name: np.concatenate([group_spectra.observed[name] for group_spectra in spectra]) for name in NULL_COLUMNS},
    )
    return MeasuredHeads(columns, whole)


def _identity_columns(layer: AttentionLayer, index: int) -> dict[str, Any]:
    heads = np.arange(layer.n_heads)
    return {
        "layer": np.full(layer.n_heads, index),
        "head": heads,
        "name": [f"L{index}H{head}" for head in heads],
        "kv_head": [layer.kv_head(int(head)) for head in heads],
        "bilinear": [layer.bilinear] * layer.n_heads,
    }


def _metric_columns(metrics: HeadMetrics) -> dict[str, Any]:
    names = {column.name for column in HEAD_COLUMNS}
    return {name: value for name, value in vars(metrics).items() if name in names}


def _phase_columns(layer: AttentionLayer, w_q: Tensor, w_k: Tensor) -> dict[str, Any]:
    if layer.rotary is None:
        return {}
    phase = phase_metrics(phase_norms(w_q, w_k, layer.rotary), layer.rotary)
    columns = {name: value.numpy() for name, value in phase._asdict().items()}
    return columns | {"rotary_fraction": np.full(layer.n_heads, layer.rotary.rotary_fraction)}
