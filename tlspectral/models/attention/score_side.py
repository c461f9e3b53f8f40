"""One side of the scores, queries or keys: after a query/key norm, gain and phase, and before any rotation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, times_phase, widened, with_gain_and_phase
from tlspectral.models.reading.latent import HeadInputs, Latent
from tlspectral.models.reading.layer import (
    AttentionLayer,
)
from tlspectral.models.reading.norms import Castable, QueryKeyNorm


@dataclass(frozen=True)
class Rotation(Castable):
    """The rotary pairs of a layer, with cos and sin at some rows (tokens).

    geometry: which columns are pairs, and their frequencies.
    cos, sin: from a run, or computed in float64.

    Tables are [(batch,) rows, pairs], or [(batch,) heads, rows, pairs] (heads = 1 if all are alike). With learnable
    rotary positions (a spectral layer) they always have the axis of heads, for the heads of the geometry.
    """

    geometry: RotaryGeometry
    cos: Float[Tensor, "*batch rows pairs"]
    sin: Float[Tensor, "*batch rows pairs"]

    def of_heads(self, heads: list[int]) -> "Rotation":
        """Return a `Rotation` with cos and sin of the query heads `heads` (indices) only, for a layer with learnable
        rotary positions.

        Other layers have one rotation for all heads: this object is then returned unchanged.
        """
        if not self.geometry.per_head:
            return self
        return Rotation(self.geometry.of_heads(heads), self.cos[..., heads, :, :], self.sin[..., heads, :, :])

    def at_one_position(self) -> "Rotation":
        """Return a new `Rotation` in which every row (token) has the cos and sin of the first row, so all offsets are
        0.
        """
        return replace(self, cos=self.cos[..., :1, :], sin=self.sin[..., :1, :])

    def of_tokens(self, rows: slice) -> "Rotation":
        """Return a new `Rotation` with cos and sin of some rows (tokens) only."""
        return replace(self, cos=self.cos[..., rows, :], sin=self.sin[..., rows, :])

    def turned(
        self, x: Float[Tensor, "*batch heads rows d_head"], direction: Literal[1, -1], pairs: Any
    ) -> Float[Tensor, "*batch heads rows columns"]:
        """Return the columns of some rotary pairs of x, rotated by their angles, as a new tensor.

        x: queries or keys. direction: 1, or -1 to rotate by the negative angles. pairs: the pairs, as a mask, indices
        or a slice. Columns of the result are [real parts, imaginary parts].
        """
        real, imag = (index.to(x.device)[pairs] for index in (self.geometry.real_index, self.geometry.imag_index))
        tables = (self.cos, direction * self.sin)
        if self.cos.ndim == 3 and not self.geometry.per_head:  # [batch, rows, pairs]: alike for all heads
            tables = tuple(table[:, None] for table in tables)
        cos, sin = (table.to(x)[..., pairs] for table in tables)
        return torch.cat(times_phase(x[..., real], x[..., imag], cos, sin), dim=-1)


@dataclass(frozen=True)
class ScoreSide(Castable):
    """Queries or keys of some heads, after norms, gain and phase, before any rotation.

    Attributes:
        whole: with bias.
        content: without bias; M acts on this part.
        token_scale: factor (1/rms) of norms after the projection, None without one: [*batch, heads, rows] per token, or
            [*batch, heads, rows, d_head] if blocks of columns have their own norms.
        rotation: cos and sin at the rows, None without rotary positions.
    """

    whole: Float[Tensor, "*batch heads rows d_head"]
    content: Float[Tensor, "*batch heads rows d_head"]
    token_scale: Float[Tensor, "*batch_heads_rows_columns"] | None
    rotation: Rotation | None

    def first(self) -> "ScoreSide":
        """Return a new `ScoreSide` with only the first sequence of the batch; its tensors are views."""
        rotation = self.rotation
        if rotation is not None and rotation.cos.ndim == rotation.geometry.theta.ndim + 2:
            rotation = rotation.as_(lambda table: table[:1])
        return replace(self.as_(lambda part: part[:1]), rotation=rotation)

    def of_tokens(self, rows: slice) -> "ScoreSide":
        """Return a new `ScoreSide` with the queries or keys of some rows (tokens) only; its tensors are views."""
        scale = self.token_scale
        if scale is not None:
            scale = scale[..., rows, :] if scale.ndim == self.whole.ndim else scale[..., rows]
        rotation = self.rotation and self.rotation.of_tokens(rows)
        return ScoreSide(self.whole[..., rows, :], self.content[..., rows, :], scale, rotation)

    def copied(self) -> "ScoreSide":
        """Return a copy of these queries or keys that shares no tensor with them."""
        return replace(self.as_(Tensor.clone), rotation=self.rotation and self.rotation.as_(Tensor.clone))

    def in_float32(self) -> "ScoreSide":
        """Return a new `ScoreSide` with these queries or keys, and cos and sin, in float32."""
        return replace(self.as_(Tensor.float), rotation=self.rotation and self.rotation.as_(Tensor.float))

    def of_head(self, index: int) -> "ScoreSide":
        """Return a new `ScoreSide` with the queries or keys of one head only. index: the head's place among the heads
        of this object.
        """
        rotation = self.rotation and self.rotation.of_heads([index])
        return replace(self.as_(lambda part: part[:, index : index + 1]), rotation=rotation)


def side(
    projected: Float[Tensor, "*batch rows heads d_head"],
    bias: Float[Tensor, "*rows heads d_head"] | None,
    norm: QueryKeyNorm | Latent | None,
    rotation: Rotation | None,
    *,
    queries: bool = False,
    token_scale: Float[Tensor, "*batch_rows_heads_columns"] | None = None,
) -> ScoreSide:
    """Return queries or keys of some heads as a `ScoreSide`, in float32 or wider.

    projected: queries or keys before their norm.
    bias: their bias; None if content (the part without bias) is not kept apart.
    norm: the query/key norm, None without one.
    rotation: cos and sin of the heads, None without rotary positions.
    queries: True applies gain and phase of learnable rotary positions, which stand in the rotation's geometry.
    token_scale: the norm's 1/rms, [*batch, rows, heads], needed if the norm's mean runs over other heads too; in latent
    attention [*batch, rows, heads, d_head].
    """
    whole = widened(projected)
    content = whole if bias is None else whole - bias.to(whole)
    if norm is not None:
        token_scale = norm.token_scale(whole) if token_scale is None else token_scale
        whole, content = (norm.applied(part, token_scale) for part in (whole, content))
        token_scale = token_scale.transpose(-2, -3) if token_scale.ndim == whole.ndim else token_scale.mT
    whole, content = whole.transpose(-2, -3), content.transpose(-2, -3)
    if queries and rotation is not None:
        whole, content = (with_gain_and_phase(part, rotation.geometry) for part in (whole, content))
    return ScoreSide(whole, content, token_scale, rotation)


def key_side(
    layer: AttentionLayer,
    projected: Float[Tensor, "*batch pos kv_heads d_head"],
    bias: Float[Tensor, "kv_heads d_head"] | None,
    rotation: Rotation | None,
    token_scale: Float[Tensor, "*batch pos heads d_head"] | None = None,
) -> ScoreSide:
    """Return the keys of a layer as a `ScoreSide`, repeated for each query head that shares them.

    projected: keys before their norm, one per key/value head. bias: their bias; None if content (the part without bias)
    is not kept apart. rotation: cos and sin, None without rotary positions. token_scale: the norm's 1/rms, if it is
    known; default: computed from `projected`.
    """
    keys = side(projected, bias, layer.k_norm, None, token_scale=token_scale)
    groups = layer.n_heads // layer.n_kv_heads
    whole, content = (part.repeat_interleave(groups, dim=-3) for part in (keys.whole, keys.content))
    scale = None if keys.token_scale is None else keys.token_scale.repeat_interleave(groups, dim=-2)
    return ScoreSide(whole, content, scale, rotation)


def run_side(
    captured: HeadInputs,
    places: list[int],
    heads: list[int],
    bias: Float[Tensor, "heads d_head"],
    norm: QueryKeyNorm | Latent | None,
    *,
    rotation: Rotation | None,
    select: Callable[[Tensor, list[int]], Tensor],
    queries: bool = False,
) -> ScoreSide:
    """Return the queries or the keys of some heads in a run as a `ScoreSide`.

    captured: queries or keys of all heads, before norm and rotation.
    places: indices of the heads in `captured`. heads: their indices in `bias` and in the gains of `norm`.
    bias, norm: of all heads of the layer; norm is None without a query/key norm.
    rotation: cos and sin of these heads, None without rotary positions.
    select: function that takes heads from a tensor [batch, pos, heads, ...].
    queries: True applies gain and phase of learnable rotary positions.
    """
    selected, scale = select(captured.projected, places), captured.token_scale
    if norm is not None and norm.over_heads:  # the norm's mean runs over other heads too
        scale = norm.token_scale(widened(captured.projected))
    scale = None if scale is None else select(scale, places)
    return side(selected, bias[heads], norm and norm.of_heads(heads), rotation, queries=queries, token_scale=scale)


def changed_side(
    projected: Float[Tensor, "*batch rows heads d_head"],
    change: Float[Tensor, "*copies rows heads d_head"] | None,
    head: int,
    bias: Float[Tensor, "*rows one d_head"] | None,
    norm: QueryKeyNorm | Latent | None,
    rotation: Rotation | None,
    *,
    queries: bool = False,
) -> ScoreSide:
    """Return the queries or keys of one head as a `ScoreSide`, with `change` added before the norm.

    projected, change: of all heads, because a norm whose mean runs over heads is computed again; neither is changed.
    The other heads do not change. change: None adds nothing. head: index of the head in `projected`. bias: None if
    content (the part without bias) is not kept apart. norm: the query/key norm, None without one. rotation: cos and sin
    at the rows, None without rotary positions. queries: True applies gain and phase of learnable rotary positions.
    """
    changed = projected[..., [head], :] if change is None else projected[..., [head], :] + change[..., [head], :]
    scale = None
    if norm is not None and norm.over_heads:
        every = projected.expand(*changed.shape[:-2], *projected.shape[-2:]).clone()
        every[..., [head], :] = changed
        scale = norm.token_scale(every)[..., [head]]
    if norm is not None and norm.gain is not None and norm.gain.ndim == 2:  # some models repeat keys but not gains
        norm = norm.of_heads([head * len(norm.gain) // projected.shape[-2]])
    return side(changed, bias, norm, rotation, queries=queries, token_scale=scale)


def rotation_at(geometry: RotaryGeometry, cos: Tensor, sin: Tensor, rows: Tensor | None) -> Rotation:
    """Return the `Rotation` of one head at some rows (tokens).

    geometry: the head's rotary pairs. cos, sin: [pos, pairs]. rows: positions of the rows, [rows] or [sequences, rows];
    None: all positions.
    """
    if rows is None:
        return Rotation(geometry, cos, sin)
    if rows.ndim == 1:
        return Rotation(geometry, cos[rows], sin[rows])
    return Rotation(geometry, cos[rows][:, None], sin[rows][:, None])


def keys_read(heads: list[int], n_heads: int, n_keys: int) -> list[int]:
    """Return a list with, for each of `heads`, the index of the key (or value) head that this query head reads.

    n_heads: query heads of the layer. n_keys: key heads, fewer if query heads share them.
    """
    return [head // (n_heads // n_keys) for head in heads]


def heads_of(tensor: Tensor, heads: list[int]) -> Tensor:
    """Return a copy of some heads of a tensor [batch, pos, heads, ...]. heads: their indices, in the order of the
    result.
    """
    return tensor[:, :, heads]
