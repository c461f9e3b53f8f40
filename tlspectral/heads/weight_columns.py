"""Columns of the head table from query-key weights: spectrum, phase, the matched random null, and columns on
request.
"""

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
from tlspectral.errors import shown
from tlspectral.errors.settings import counted
from tlspectral.heads.copying import EmbeddingMoments
from tlspectral.heads.operators.verification import checked_prompts
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import AttentionLayer
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.passes import capture_until
from tlspectral.tables.head_columns import HEAD_COLUMNS

_NAMES = {column.name for column in HEAD_COLUMNS}
POSITION_DIRECTIONS = 64


@dataclass(frozen=True)
class NullSettings:
    """How the random null of a head table is drawn: random matrices with the head's singular values and random
    directions.

    Attributes:
        seed: seed of the draws.
        null_draws: number of random matrices per head, 2 or more.
        null_blocks: "shared" uses the same random directions for all heads, "fresh" new ones for each.
        null_dtype: precision of the eigenvalues of the draws.
    """

    seed: int
    null_draws: int
    null_blocks: Literal["shared", "fresh"]
    null_dtype: Literal["float32", "float64"]

    def __post_init__(self) -> None:
        """Raise ValueError for an unknown `null_blocks` or `null_dtype`, or fewer than two draws."""
        if self.null_blocks not in ("shared", "fresh"):
            raise ValueError(f"null_blocks must be 'shared' or 'fresh', not {shown(self.null_blocks)}")
        if self.null_dtype not in ("float32", "float64"):
            raise ValueError(f"null_dtype must be 'float32' or 'float64', not {shown(self.null_dtype)}")
        object.__setattr__(self, "null_draws", counted(self.null_draws, 2, "null_draws is how many draws the null has"))


@dataclass(frozen=True)
class MeasuredHeads:
    """Columns of some heads of one layer, before their null is drawn.

    Attributes:
        layer: index of the layer.
        columns: values by column name, an entry for each head.
        attrs: `attrs` of the table.
        effective_dimension: dimension of the space that the heads read, d_model or, under LayerNorm, d_model - 1.
        singular_values: singular values of each head's M, which the null keeps.
    """

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
    """Return a `MeasuredHeads` of all heads of a folded layer: its `.columns` are the spectral and phase columns of the
    head table, without the null.

    `index` is the layer's number in the model. `moments` are sums over the token embedding for `self_match`, None for
    NaN. `directions` are singular directions of the learned positions for `position_share`, None for NaN. Keys repeated
    for each query head are freed on return.
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
    columns["position_share"] = np.full(len(w_q), np.nan)
    if directions is not None:  # ||P^T M P|| / ||M||, `pos_frac_M` of "Fingerprint, Not Blueprint"
        inner = torch.linalg.matrix_norm((directions.T @ w_q) @ (directions.T @ w_k).mT)
        columns["position_share"] = (inner / operator_norms(w_q, w_k)).numpy()
    return MeasuredHeads(
        index, columns, {"valid_up_to": layer.valid_up_to}, layer.effective_dimension, metrics.singular_values
    )


def block_columns(layer: AttentionLayer, w_q: Tensor, w_k: Tensor) -> dict[str, Float64[np.ndarray, "heads"]]:
    """Return the columns of latent attention, a dict from column name to array [heads], for the content and the rotary
    block of M = `w_q` `w_k`^T.

    They are `dir_frac_`, `D_head_` and `norm_frac_` (norm of the block over the norm of M), each with `content` and
    `rotary`. `layer` says which columns rotate; it must have rotary positions.
    """
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
    """Return the Frobenius norm of M = `w_q` `w_k`^T of each head."""
    return ((w_q.mT @ w_q) * (w_k.mT @ w_k)).sum((1, 2)).sqrt()


def of_heads(groups: Sequence[MeasuredHeads], heads: Sequence[int]) -> MeasuredHeads:
    """Join measured groups of heads of one layer, and return a new `MeasuredHeads` with only the heads `heads`.

    `groups` are the groups of heads that share keys, in the order of the layer. `heads` are numbers within the layer.
    The result has the columns `layer` and `head`, too.
    """
    first, rows = groups[0], list(heads)
    columns = {name: np.concatenate([np.asarray(group.columns[name]) for group in groups]) for name in first.columns}
    columns["kv_head"] = np.concatenate([np.asarray(group.columns["kv_head"]) + i for i, group in enumerate(groups)])
    chosen = {name: values[rows] for name, values in columns.items()}
    singular_values = np.concatenate([group.singular_values for group in groups])[rows]
    return replace(first, columns={"layer": first.layer, "head": rows, **chosen}, singular_values=singular_values)


def phase_columns(w_q: Tensor, w_k: Tensor, rotary: RotaryGeometry) -> dict[str, Float64[np.ndarray, "heads"]]:
    """Return three measures of the phase Im(M_t) of each head, a dict from column name to array [heads].

    `rope_imag_frac` is the share of Im(M_t) in the norms of Re M_t and Im M_t over the rotary pairs t, `freq_centroid`
    the mean frequency of Im(M_t) (radians per token), `hi_freq_dir` the share of Im(M_t) in the first half of the
    pairs. `w_q` and `w_k` are the factors of M, `rotary` the geometry of the pairs.
    """
    metrics = phase_metrics(phase_norms(w_q, w_k, rotary), rotary)
    return {name: value.numpy() for name, value in metrics._asdict().items()}


def with_null(
    measured: MeasuredHeads, settings: NullSettings, map_heads: Callable[..., Iterable[Any]] = map
) -> pd.DataFrame:
    """Return a new table of the heads in `measured`, whose columns are completed by the mean, standard deviation, z and
    percentile of their random null.

    `settings` says how the null is drawn. A seed and the sizes fix the random draws (with "fresh" blocks also layer and
    head), so results do not depend on order or workers. Shared random blocks stay in memory until `forget_blocks` is
    called. `map_heads` has the signature of `map` and may run in threads or processes.
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
    nulls = list(map_heads(of_head, heads))
    table = pd.DataFrame(measured.columns | {name: np.concatenate([null[name] for null in nulls]) for name in nulls[0]})
    table.attrs = measured.attrs
    return table


def _null_of_head(
    settings: NullSettings,
    n: int,
    layer: int,
    measured: tuple[int, Float64[np.ndarray, "1 k"], dict[str, Float64[np.ndarray, "1"]]],
) -> dict[str, np.ndarray]:
    """Draw the null of one head and return its columns (null mean, standard deviation, z, percentile), arrays [1] by
    name.

    `settings` says how it is drawn. `n` is the dimension of the space that the head reads, `layer` the number of its
    layer. `measured` is (head, singular values, the observed metrics by name).
    """
    head, singular_values, observed = measured
    k, draws = singular_values.shape[1], settings.null_draws
    if settings.null_blocks == "shared":
        with _DRAWING:  # one thread draws the shared blocks, the other threads wait
            blocks = _shared_blocks(settings.seed, n, k, draws)
    else:
        blocks = haar_blocks(n, k, draws, block_generator(settings.seed, n, k, layer, head))
    return null_statistics(singular_values, observed, blocks, n, settings.null_dtype)


_DRAWING = Lock()


@lru_cache(maxsize=2)
def _shared_blocks(seed: int, n: int, k: int, draws: int) -> Float64[Tensor, "draws k k"]:
    """Return `draws` random k x k blocks of an n-dimensional space, drawn with `seed`. They are cached, because all
    heads of equal size use them.
    """
    return haar_blocks(n, k, draws, block_generator(seed, n, k))


def blocks_at_once(measured: MeasuredHeads, settings: NullSettings) -> int:
    """Return how many heads of `measured` can have their random blocks in memory together; all heads if `settings` has
    shared blocks.
    """
    heads, k = measured.singular_values.shape
    return heads if settings.null_blocks == "shared" else max(1, MOST_BYTES // (8 * k * k * settings.null_draws))


def forget_blocks() -> None:
    """Free the cached shared random blocks."""
    _shared_blocks.cache_clear()


@dataclass(frozen=True)
class ReadStreams:
    """The residual streams that the layers of a model read on some prompts.

    Attributes:
        view: the model.
        residuals: input of each layer, by the name of its hook point.
        real: True at tokens, False at padding.
    """

    view: AttentionView
    residuals: dict[str, Tensor]
    real: Bool[Tensor, "batch pos"]

    def normalized(self, layer: AttentionLayer) -> Float64[Tensor, "batch pos d_model"]:
        """Return the normalised input of a layer, without gain and bias; 0 at padding."""
        residual = self.residuals[self.view.hook_names(layer.layer)["residual"]]
        return layer.norm.normalized(residual.cpu().double()) * self.real[..., None]

    def score_asymmetry(self, layer: AttentionLayer) -> Float64[np.ndarray, "heads"]:
        """Return mean ||S - S^T|| / mean ||S|| of each head, an array [heads]; means are over prompts.

        S = n M n^T are the content scores of a prompt, n its normalised inputs. S has all pairs of positions, without
        mask, rotation, biases and the scalars of query/key norms. Source: "Fingerprint, Not Blueprint" (FP), section 4.
        """
        n = self.normalized(layer)
        w_q, w_k = layer.operator_factors()
        by_head = "prompt pos d_model, head d_model d_head -> prompt head pos d_head"
        scores = einsum(n, w_q, by_head) @ einsum(n, w_k, by_head).mT
        size = torch.linalg.matrix_norm(scores).mean(0)
        return (torch.linalg.matrix_norm(scores - scores.mT).mean(0) / size).numpy()

    def with_content_scale(self, layer: AttentionLayer) -> AttentionLayer:
        """Return a latent-attention layer whose M uses the key scale that was measured on the prompts; other layers
        unchanged.

        The scale is the mean 1/rms of the keys' latent. The first token of each prompt is left out of the mean. Raises
        ValueError if all prompts have one token.
        """
        latent = layer.k_norm
        if not isinstance(latent, Latent):
            return layer
        counted = self.real & (self.real.cumsum(1) > 1)
        if not counted.any():
            raise ValueError(
                "content_scale leaves out the first token of each prompt: give prompts= of two tokens or more"
            )
        scale = latent.scale_of(self.normalized(layer) @ latent.down + latent.bias_or_zero)[..., 0, 0]
        return replace(layer, k_norm=replace(latent, measured_scale=float(scale[counted].mean())))


def read_streams(view: AttentionView, prompts: Any) -> ReadStreams:
    """Run the model in `view` on the prompts (None: one prompt of 24 random ids) and return the input of every layer,
    as `ReadStreams`.

    Its `.residuals` has these inputs [batch, pos, d_model] by hook name, `.real` is True at tokens. Raises ValueError
    or TypeError for prompts that cannot be read.
    """
    packed = checked_prompts(view, prompts)
    names = [view.hook_names(index)["residual"] for index in view.layers]
    residuals = capture_until(view, packed.tokens, names, last=view.hook_names(view.layers[-1])["pattern"])
    return ReadStreams(view, residuals, packed.real)


def position_directions(view: AttentionView) -> Float64[Tensor, "d_model directions"] | None:
    """Return the leading right singular vectors of the learned position embedding of the model in `view`, as columns,
    at most 64.

    None without learned positions. Under LayerNorm the rows are centred first, because the norm removes their mean.
    """
    positions = view.position_embedding()
    if positions is None:
        return None
    rows = positions.detach().cpu().double()
    if view.raw(view.layers[0]).norm.kind == "LN":
        rows = rows - rows.mean(1, keepdim=True)
    return torch.linalg.svd(rows, full_matrices=False).Vh[:POSITION_DIRECTIONS].T
