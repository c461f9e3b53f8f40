"""The matched null of a whole table, layer by layer, in this process or by several workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
from jaxtyping import Float64
from torch import Tensor

from tlspectral.nulls import NULL_COLUMNS, block_generator, haar_blocks, null_statistics
from tlspectral.tables import WorkPart, finished_parts


@dataclass(frozen=True)
class LayerSpectra:
    """What the null of a layer is matched to: its heads' singular values and observed metrics, and their indices."""

    layer: int
    heads: tuple[int, ...]
    effective_dimension: int
    singular_values: Float64[np.ndarray, "heads k"]
    observed: dict[str, Float64[np.ndarray, "heads"]]


def null_columns(
    layers: Sequence[LayerSpectra],
    *,
    draws: int,
    blocks: Literal["shared", "fresh"],
    dtype: Literal["float32", "float64"],
    seed: int,
    n_jobs: int,
    show_progress: bool,
) -> list[pd.DataFrame]:
    """Compute null mean, std, z and percentile of each layer's heads, a table per layer in the order of `layers`.

    Blocks are drawn from generators keyed by seed and sizes (`fresh`: and by layer and head), so the numbers depend on
    neither the order of layers nor the number of workers.
    """
    work = partial(layer_null, draws=draws, blocks=blocks, dtype=dtype, seed=seed)
    parts = [WorkPart(f"L{layer.layer:03d}", partial(work, layer)) for layer in layers]
    try:
        tables = finished_parts(parts, description="null", unit="layer", n_jobs=n_jobs, show_progress=show_progress)
        return list(tables.values())
    finally:
        forget_blocks()


def forget_blocks() -> None:
    """Free the cached shared blocks."""
    _shared_blocks.cache_clear()


@lru_cache(maxsize=2)
def _shared_blocks(seed: int, n: int, k: int, draws: int) -> Float64[Tensor, "draws k k"]:
    return haar_blocks(n, k, draws, block_generator(seed, n, k))


def layer_null(
    layer: LayerSpectra,
    *,
    draws: int,
    blocks: Literal["shared", "fresh"],
    dtype: Literal["float32", "float64"],
    seed: int,
) -> pd.DataFrame:
    """Compute `null_columns` of one layer. Shared blocks stay in the cache until `forget_blocks`."""
    n, k = layer.effective_dimension, layer.singular_values.shape[1]
    if blocks == "shared":
        block_source: Any = _shared_blocks(seed, n, k, draws)
    else:
        block_source = partial(_fresh_blocks, layer.heads, seed=seed, n=n, k=k, draws=draws, layer=layer.layer)
    observed = {column: layer.observed[column] for column in NULL_COLUMNS}
    return pd.DataFrame(null_statistics(layer.singular_values, observed, block_source, n, dtype))


def _fresh_blocks(
    heads: tuple[int, ...], row: int, *, seed: int, n: int, k: int, draws: int, layer: int
) -> Float64[Tensor, "draws k k"]:
    return haar_blocks(n, k, draws, block_generator(seed, n, k, layer, heads[row]))
