"""Columns that follow from the query-key factors of a layer's heads, and their matched null."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from tlspectral.composition.copying import EmbeddingMoments
from tlspectral.heads.extras import position_shares
from tlspectral.models.attention import AttentionLayer
from tlspectral.nulls import NULL_COLUMNS, block_generator, haar_blocks, null_statistics
from tlspectral.rotary import RotaryGeometry, phase_metrics, phase_norms
from tlspectral.selection import head_name
from tlspectral.spectra import head_metrics
from tlspectral.tables import HEAD_COLUMNS

_NAMES = {column.name for column in HEAD_COLUMNS}


@dataclass(frozen=True)
class NullSettings:
    """How the matched null is drawn; see `analyze_heads`."""

    seed: int
    null_draws: int
    null_blocks: Literal["shared", "fresh"]
    null_dtype: Literal["float32", "float64"]


def checked_null(
    seed: int,
    null_draws: int,
    null_blocks: Literal["shared", "fresh"],
    null_dtype: Literal["float32", "float64"],
) -> NullSettings:
    """Return the settings. Raises ValueError where no model can have them."""
    if null_blocks not in ("shared", "fresh"):
        raise ValueError(f"null_blocks must be 'shared' or 'fresh', not {null_blocks!r}")
    if null_dtype not in ("float32", "float64"):
        raise ValueError(f"null_dtype must be 'float32' or 'float64', not {null_dtype!r}")
    if null_draws < 2:
        raise ValueError(f"the null needs at least two draws, found null_draws={null_draws}")
    return NullSettings(seed, null_draws, null_blocks, null_dtype)


@dataclass(frozen=True)
class MeasuredHeads:
    """Columns of some or all heads of a layer, what else their null is matched to, and the `attrs` of their table."""

    layer: int
    columns: dict[str, Any]
    attrs: dict[Any, Any]
    effective_dimension: int
    singular_values: Float64[np.ndarray, "heads k"]


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
    columns = _identity_columns(index, [layer.kv_head(head) for head in range(layer.n_heads)])
    columns["bilinear"] = [layer.bilinear] * layer.n_heads
    columns |= {name: value for name, value in vars(metrics).items() if name in _NAMES}
    if layer.rotary is not None:
        columns |= phase_columns(w_q, w_k, layer.rotary)
        columns["rotary_fraction"] = np.full(layer.n_heads, layer.rotary.rotary_fraction)
    columns["self_match"] = np.full(len(w_q), np.nan) if moments is None else moments.self_match(w_q, w_k)
    columns["position_share"] = position_shares(w_q, w_k, directions)
    attrs = {"digest": layer.digest, "valid_up_to": layer.valid_up_to}
    return MeasuredHeads(index, columns, attrs, layer.effective_dimension, metrics.singular_values)


def selected(measured: MeasuredHeads, heads: Sequence[int]) -> MeasuredHeads:
    """Return some heads of a layer that was measured whole, in the order of `heads`."""
    rows = list(heads)
    columns = {name: np.asarray(values)[rows] for name, values in measured.columns.items()}
    return replace(measured, columns=columns, singular_values=measured.singular_values[rows])


def joined(groups: list[MeasuredHeads]) -> MeasuredHeads:
    """Join the heads of one layer, of which each key/value group was measured by itself."""
    first = groups[0]
    columns = {name: np.concatenate([np.asarray(group.columns[name]) for group in groups]) for name in first.columns}
    group_sizes = [len(group.singular_values) for group in groups]
    columns |= _identity_columns(first.layer, np.repeat(np.arange(len(groups)), group_sizes))
    singular_values = np.concatenate([group.singular_values for group in groups])
    return replace(first, columns=columns, attrs={}, singular_values=singular_values)


def _identity_columns(index: int, kv_heads: Sequence[int] | np.ndarray) -> dict[str, Any]:
    heads = np.arange(len(kv_heads))
    return {
        "layer": np.full(len(heads), index),
        "head": heads,
        "name": [head_name(index, head) for head in range(len(heads))],
        "kv_head": kv_heads,
    }


def phase_columns(w_q: Tensor, w_k: Tensor, rotary: RotaryGeometry) -> dict[str, Float64[np.ndarray, "heads"]]:
    """Compute `phase_metrics` of heads, as columns."""
    metrics = phase_metrics(phase_norms(w_q, w_k, rotary), rotary)
    return {name: value.numpy() for name, value in metrics._asdict().items()}


def with_null(measured: MeasuredHeads, settings: NullSettings) -> pd.DataFrame:
    """Return the columns of the heads with null mean, std, z and percentile.

    Blocks are drawn from generators keyed by seed and sizes (`fresh`: and by layer and head), so the numbers depend on
    neither the order of layers nor the number of workers. Shared blocks stay in the cache until `forget_blocks`.
    """
    n, k, draws = measured.effective_dimension, measured.singular_values.shape[1], settings.null_draws

    def fresh_blocks(row: int) -> Float64[Tensor, "draws k k"]:
        head = int(measured.columns["head"][row])
        return haar_blocks(n, k, draws, block_generator(settings.seed, n, k, measured.layer, head))

    blocks = _shared_blocks(settings.seed, n, k, draws) if settings.null_blocks == "shared" else fresh_blocks
    observed = {name: measured.columns[name] for name in NULL_COLUMNS}
    null = null_statistics(measured.singular_values, observed, blocks, n, settings.null_dtype)
    table = pd.DataFrame(measured.columns | null)
    table.attrs = measured.attrs
    return table


@lru_cache(maxsize=2)
def _shared_blocks(seed: int, n: int, k: int, draws: int) -> Float64[Tensor, "draws k k"]:
    return haar_blocks(n, k, draws, block_generator(seed, n, k))


def forget_blocks() -> None:
    """Free the cached shared blocks."""
    _shared_blocks.cache_clear()
