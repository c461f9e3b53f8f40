"""Columns that follow from the query-key factors of a layer's heads, their matched null, and those asked for."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from threading import Lock
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.algebra.nulls import MOST_BYTES, NULL_COLUMNS, block_generator, haar_blocks, null_statistics
from tlspectral.algebra.rotary import RotaryGeometry, phase_metrics, phase_norms
from tlspectral.algebra.spectra import head_metrics
from tlspectral.heads.copying import EmbeddingMoments
from tlspectral.heads.operators.verification import checked_prompts
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import capture_until
from tlspectral.selection import counted
from tlspectral.tables.head_columns import HEAD_COLUMNS

_NAMES = {column.name for column in HEAD_COLUMNS}
POSITION_DIRECTIONS = 64


@dataclass(frozen=True)
class NullSettings:
    """How the matched null is drawn; see `analyze_heads`."""

    seed: int
    null_draws: int
    null_blocks: Literal["shared", "fresh"]
    null_dtype: Literal["float32", "float64"]

    def __post_init__(self) -> None:
        """Raise ValueError where no model can have these settings."""
        if self.null_blocks not in ("shared", "fresh"):
            raise ValueError(f"null_blocks must be 'shared' or 'fresh', not {self.null_blocks!r}")
        if self.null_dtype not in ("float32", "float64"):
            raise ValueError(f"null_dtype must be 'float32' or 'float64', not {self.null_dtype!r}")
        object.__setattr__(self, "null_draws", counted(self.null_draws, 2, "null_draws is how many draws the null has"))


@dataclass(frozen=True)
class MeasuredHeads:
    """Columns of heads of one layer, what their null needs, and the `attrs` of their table."""

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

    The repeated keys are freed on return: only one layer's are held at a time. Without `moments`, `self_match` is NaN.
    """
    w_q, w_k = layer.operator_factors()
    metrics = head_metrics(w_q, w_k, storage_dtype=layer.storage_dtype, effective_dimension=layer.effective_dimension)
    columns: dict[str, Any] = {
        "kv_head": [layer.kv_head(head) for head in range(layer.n_heads)],
        "bilinear": [layer.bilinear] * layer.n_heads,
    }
    columns |= {name: value for name, value in vars(metrics).items() if name in _NAMES}
    if layer.rotary is not None:
        columns |= phase_columns(w_q, w_k, layer.rotary)
        columns["rotary_fraction"] = np.full(layer.n_heads, layer.rotary.rotary_fraction)
    if isinstance(layer.k_norm, Latent):
        columns |= block_columns(layer, w_q, w_k)
        if layer.k_norm.measured_scale is not None:
            columns["content_scale"] = np.full(layer.n_heads, layer.k_norm.measured_scale)
    own_keys = w_k[:: layer.n_heads // layer.n_kv_heads]
    columns["self_match"] = np.full(len(w_q), np.nan) if moments is None else moments.self_match(w_q, own_keys)
    columns["position_share"] = _position_shares(w_q, w_k, directions)
    return MeasuredHeads(
        index, columns, {"valid_up_to": layer.valid_up_to}, layer.effective_dimension, metrics.singular_values
    )


def block_columns(layer: AttentionLayer, w_q: Tensor, w_k: Tensor) -> dict[str, Float64[np.ndarray, "heads"]]:
    """Compute the columns of latent attention: of the content block alone, and of the rotary block alone."""
    assert layer.rotary is not None
    content = layer.rotary.still_columns
    rotary = torch.cat([layer.rotary.real_index, layer.rotary.imag_index])
    kept = {"storage_dtype": layer.storage_dtype, "effective_dimension": layer.effective_dimension}
    norm, columns = operator_norms(w_q, w_k), {}
    for name, block in (("content", content), ("rotary", rotary)):
        metrics = head_metrics(w_q[..., block], w_k[..., block], **kept)
        columns |= {f"dir_frac_{name}": metrics.dir_frac, f"D_head_{name}": metrics.D_head}
        columns[f"norm_frac_{name}"] = (operator_norms(w_q[..., block], w_k[..., block]) / norm).numpy()
    return columns


def operator_norms(
    w_q: Float64[Tensor, "heads d_model d_head"], w_k: Float64[Tensor, "heads d_model d_head"]
) -> Float64[Tensor, "heads"]:
    """Return ||M||_F of each head."""
    return ((w_q.mT @ w_q) * (w_k.mT @ w_k)).sum((1, 2)).sqrt()


def of_heads(groups: Sequence[MeasuredHeads], heads: Sequence[int]) -> MeasuredHeads:
    """Return some heads of a layer that was measured one key/value group after another."""
    first, rows = groups[0], list(heads)
    columns = {name: np.concatenate([np.asarray(group.columns[name]) for group in groups]) for name in first.columns}
    columns["kv_head"] = np.concatenate([np.asarray(group.columns["kv_head"]) + i for i, group in enumerate(groups)])
    chosen = {name: values[rows] for name, values in columns.items()}
    singular_values = np.concatenate([group.singular_values for group in groups])[rows]
    return replace(first, columns={"layer": first.layer, "head": rows, **chosen}, singular_values=singular_values)


def phase_columns(w_q: Tensor, w_k: Tensor, rotary: RotaryGeometry) -> dict[str, Float64[np.ndarray, "heads"]]:
    """Compute `phase_metrics` of heads, as columns."""
    metrics = phase_metrics(phase_norms(w_q, w_k, rotary), rotary)
    return {name: value.numpy() for name, value in metrics._asdict().items()}


def with_null(
    measured: MeasuredHeads, settings: NullSettings, each: Callable[..., Iterable[Any]] = map
) -> pd.DataFrame:
    """Return the columns of the heads with null mean, std, z and percentile.

    Blocks are drawn from generators keyed by seed and sizes (`fresh`: and by layer and head), so the numbers depend on
    neither the order of layers nor the number of workers. Shared blocks stay in the cache until `forget_blocks`.
    `each` calls a function for each head, as `map` does, in any thread or process.
    """
    of_head = partial(_null_of_head, settings, measured.effective_dimension, measured.layer)
    heads = [
        (
            measured.columns["head"][row],
            measured.singular_values[row : row + 1],
            {name: measured.columns[name][row : row + 1] for name in NULL_COLUMNS},
        )
        for row in range(len(measured.singular_values))
    ]
    nulls = list(each(of_head, heads))
    table = pd.DataFrame(measured.columns | {name: np.concatenate([null[name] for null in nulls]) for name in nulls[0]})
    table.attrs = measured.attrs
    return table


def _null_of_head(
    settings: NullSettings,
    n: int,
    layer: int,
    measured: tuple[int, Float64[np.ndarray, "1 k"], dict[str, Float64[np.ndarray, "1"]]],
) -> dict[str, np.ndarray]:
    head, singular_values, observed = measured
    k, draws = singular_values.shape[1], settings.null_draws
    if settings.null_blocks == "shared":
        with _DRAWING:  # the threads of a layer wait for the first, which draws the blocks for all
            blocks = _shared_blocks(settings.seed, n, k, draws)
    else:
        blocks = haar_blocks(n, k, draws, block_generator(settings.seed, n, k, layer, head))
    return null_statistics(singular_values, observed, blocks, n, settings.null_dtype)


_DRAWING = Lock()


@lru_cache(maxsize=2)
def _shared_blocks(seed: int, n: int, k: int, draws: int) -> Float64[Tensor, "draws k k"]:
    return haar_blocks(n, k, draws, block_generator(seed, n, k))


def blocks_at_once(measured: MeasuredHeads, settings: NullSettings) -> int:
    """Return how many heads can have their blocks in memory together, by the limit for one head's; shared: all."""
    heads, k = measured.singular_values.shape
    return heads if settings.null_blocks == "shared" else max(1, MOST_BYTES // (8 * k * k * settings.null_draws))


def forget_blocks() -> None:
    """Free the cached shared blocks."""
    _shared_blocks.cache_clear()


@dataclass(frozen=True)
class ReadStreams:
    """The residual streams that the layers of a model read on some prompts, and which of their tokens are real."""

    view: AttentionView
    residuals: dict[str, Tensor]
    real: Bool[Tensor, "batch pos"]

    def normalized(self, layer: AttentionLayer) -> Float64[Tensor, "batch pos d_model"]:
        """Return what a layer reads behind its norm, without gain and bias; 0 where a prompt is filled up."""
        residual = self.residuals[self.view.hook_names(layer.layer)["residual"]]
        return layer.norm.normalized(residual.cpu().double()) * self.real[..., None]

    def score_asymmetry(self, layer: AttentionLayer) -> Float64[np.ndarray, "heads"]:
        """Return, per head, `mean ||S - S^T|| / mean ||S||` over prompts, `S = n M n^T` (FP section 4).

        Scores are of content alone: all pairs of positions, without mask, rotation, biases and query/key-norm scalars.
        """
        n = self.normalized(layer)
        w_q, w_k = layer.operator_factors()
        by_head = "prompt pos d_model, head d_model d_head -> prompt head pos d_head"
        scores = einsum(n, w_q, by_head) @ einsum(n, w_k, by_head).mT
        size = torch.linalg.matrix_norm(scores).mean(0)
        return (torch.linalg.matrix_norm(scores - scores.mT).mean(0) / size).numpy()

    def with_content_scale(self, layer: AttentionLayer) -> AttentionLayer:
        """Return a layer whose M has 1/rms of the keys' latent, its mean over all tokens but the first of each prompt.

        Other layers are returned as they are. Raises ValueError for prompts of one token.
        """
        latent = layer.k_norm
        if not isinstance(latent, Latent):
            return layer
        counted = self.real & (self.real.cumsum(1) > 1)
        if not counted.any():
            raise ValueError("content_scale leaves out the first token of each prompt: give prompts of two or more")
        scale = latent.scale_of(self.normalized(layer) @ latent.down + latent.bias_or_zero)[..., 0, 0]
        return replace(layer, k_norm=replace(latent, measured_scale=float(scale[counted].mean())))


def read_streams(view: AttentionView, prompts: Any) -> ReadStreams:
    """Run the prompts, for None the random one of the self-check; FP uses text."""
    packed = checked_prompts(view, prompts)
    names = [view.hook_names(index)["residual"] for index in view.layers]
    residuals = capture_until(view, packed.tokens, names, last=view.hook_names(view.layers[-1])["pattern"])
    return ReadStreams(view, residuals, packed.real)


def position_directions(view: AttentionView) -> Float64[Tensor, "d_model directions"] | None:
    """Return the leading right singular vectors of the learned position embedding, at most 64.

    None without learned positions. Under LayerNorm the rows are centred first, because the norm removes their mean.
    """
    positions = view.position_embedding()
    if positions is None:
        return None
    rows = positions.detach().cpu().double()
    if view.raw(view.layers[0]).norm.kind == "LN":
        rows = rows - rows.mean(1, keepdim=True)
    return torch.linalg.svd(rows, full_matrices=False).Vh[:POSITION_DIRECTIONS].T


def _position_shares(
    w_q: Float64[Tensor, "heads d_model d_head"],
    w_k: Float64[Tensor, "heads d_model d_head"],
    directions: Float64[Tensor, "d_model directions"] | None,
) -> Float64[np.ndarray, "heads"]:
    """Return `||P^T M P|| / ||M||`, P the position directions: FP's `pos_frac_M`. NaN without learned positions."""
    if directions is None:
        return np.full(len(w_q), np.nan)
    inner = torch.linalg.matrix_norm((directions.T @ w_q) @ (directions.T @ w_k).mT)
    return (inner / operator_norms(w_q, w_k)).numpy()
