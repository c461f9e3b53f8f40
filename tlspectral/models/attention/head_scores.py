"""The scores of a head: queries, keys, and their products.

A side (queries or keys) is taken after a query/key norm, gain and phase, and before any rotation. `HeadScores` has
three constructors. `of_stream` computes the sides from the residual stream with folded weights in float64. `of_run`
takes the queries and keys of a run. `of_rows` takes some rows of queries and keys of one head.

Let S+ be the score with the model's own rotations and S- the score with every angle negated. Then

    C = (S+ + S-) / 2     even in the offset: Re(M_t) and columns that do not rotate
    D = (S+ - S-) / 2     odd in the offset: Im(M_t)

The symmetric part (C + C^T)/2, the antisymmetric part (C - C^T)/2 and D add up to the score. `at_one_position` gives C
at offset 0, whose symmetric and antisymmetric parts are those of the matrix M itself. All results are matrices over
pairs of tokens, computed without a loop over frequencies and without a d_model x d_model matrix ("Fingerprint, Not
Blueprint", sections 5, 8 and 10).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, per_pair, times_phase, widened, with_gain_and_phase
from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.reading.latent import HeadInputs, Latent
from tlspectral.models.reading.layer import (
    AttentionLayer,
    LayerSettings,
    RawAttention,
    fold_attention,
    folded_bias,
    key_value_groups,
    projection,
    require_even_scale,
    softcapped,
)
from tlspectral.models.reading.norms import Castable, QueryKeyNorm, double
from tlspectral.models.reading.view import AttentionView

Tables = tuple[Float[Tensor, "*heads pos pairs"], Float[Tensor, "*heads pos pairs"]]


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
        cos, sin = (self._per_head(table).to(x)[..., pairs] for table in (self.cos, direction * self.sin))
        return torch.cat(times_phase(x[..., real], x[..., imag], cos, sin), dim=-1)

    def _per_head(self, table: Tensor) -> Tensor:
        """Return `table`, cos or sin [batch, rows, pairs], with an axis of heads (length 1) added; tables with other
        axes unchanged.
        """
        return table[:, None] if table.ndim == 3 and not self.geometry.per_head else table


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


def _run_side(
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


def _changed_side(
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


def _rotation_at(geometry: RotaryGeometry, cos: Tensor, sin: Tensor, rows: Tensor | None) -> Rotation:
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


def _heads_of(tensor: Tensor, heads: list[int]) -> Tensor:
    """Return a copy of some heads of a tensor [batch, pos, heads, ...]. heads: their indices, in the order of the
    result.
    """
    return tensor[:, :, heads]


def _as_stored(weight: Tensor) -> Tensor:
    """Return the weight unchanged."""
    return weight


@dataclass(frozen=True)
class HeadScores:
    """Scores of some heads of a layer, computed from their queries and keys.

    Methods that return scores return a tensor [*batch, heads, queries, keys].

    Attributes:
        layer: settings of the layer: score scale, softcap, norms, rotation.
        heads: indices of the heads in the layer. If several jobs are stacked on the batch, head i of copy i.
        query, key: queries and keys.
        exchanged: for some queries of a prompt (`of_queries`), the scores in the other direction: queries at the tokens
            of `key`, keys at the tokens of `query`. None if queries and keys are at the same tokens.
    """

    layer: LayerSettings
    heads: list[int]
    query: ScoreSide
    key: ScoreSide
    exchanged: "HeadScores | None" = None

    @classmethod
    def of_stream(
        cls, layer: AttentionLayer, residual: Float64[Tensor, "batch pos d_model"], tables: Tables | None
    ) -> "HeadScores":
        """Return the `HeadScores` of all heads of a folded layer from its input stream, in float64.

        residual: the residual stream that enters the layer. tables: (cos, sin) of each rotary pair, with learnable
        rotary positions per query head; None without rotary positions.
        """
        n = layer.norm.normalized(residual)
        rotation = None if tables is None or layer.rotary is None else Rotation(layer.rotary, *tables)
        by_head = "batch pos d_model, head d_model d_head -> batch pos head d_head"
        q = einsum(n, layer.w_q, by_head) + layer.b_q
        k = einsum(n, layer.w_k, by_head) + layer.b_k
        at_query, at_key = (
            norm.scale_of(n @ norm.down + norm.bias_or_zero) if isinstance(norm, Latent) else None
            for norm in (layer.q_norm, layer.k_norm)
        )
        return cls(
            layer,
            list(range(layer.n_heads)),
            side(q, layer.b_q, layer.q_norm, rotation, queries=True, token_scale=at_query),
            key_side(layer, k, layer.b_k, rotation, at_key),
        )

    @classmethod
    def of_run(
        cls,
        layer: AttentionLayer | RawAttention,
        heads: list[int],
        query: Float[Tensor, "*of_queries"],
        key: Float[Tensor, "*of_keys"],
        rotation: Rotation | None,
        *,
        select: Callable[[Tensor, list[int]], Tensor] | None = None,
    ) -> "HeadScores":
        """Return the `HeadScores` of some heads from a run's activations at the hook points of queries and keys.

        layer: with a `RawAttention` gradients reach biases and gains; an `AttentionLayer` holds copies.
        query, key: activations at the two hook points.
        rotation: rotation of these heads (`Rotation.of_heads`), None without rotary positions.
        select: function of (tensor [batch, pos, heads, ...], heads) that takes heads. Default: these heads from the
        whole batch.
        """
        if isinstance(layer, AttentionLayer):
            b_q, b_k = layer.b_q, layer.b_k
        else:
            b_q, b_k = (folded_bias(*projection(layer, what, _as_stored), layer.norm) for what in ("q", "k"))
        select = _heads_of if select is None else select
        queries, keys = layer.inputs("query", query), layer.inputs("key", key)
        kv_heads = keys_read(heads, len(b_q), len(b_k))
        key_places = keys_read(heads, len(b_q), keys.projected.shape[2])
        one_side = partial(_run_side, rotation=rotation, select=select)
        return cls(
            layer,
            heads,
            one_side(queries, heads, heads, b_q, layer.q_norm, queries=True),
            one_side(keys, key_places, kv_heads, b_k, layer.k_norm),
        )

    @classmethod
    def of_rows(
        cls,
        layer: LayerSettings,
        head: int,
        query: Float[Tensor, "*batch queries heads d_head"],
        key: Float[Tensor, "*batch keys kv_heads d_head"],
        tables: Tables | None,
        query_rows: Int[Tensor, "*sequences #queries"],
        key_rows: Int[Tensor, "*sequences #keys"] | None = None,
        *,
        query_change: Float[Tensor, "*copies queries heads d_head"] | None = None,
        key_change: Float[Tensor, "*copies keys kv_heads d_head"] | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> "HeadScores":
        """Return the `HeadScores` of one head between some queries and some keys at given positions.

        Args:
            query, key: queries and keys before query/key norm and rotation, of all heads of the layer; keys may be
                repeated per query head. A layer without such a norm needs only this head.
            tables: (cos, sin) of each rotary pair at all positions, with learnable rotary positions per head; None
                without rotary positions.
            query_rows, key_rows: position of each query and key; one position stands for all. Default of `key_rows`:
                key i is at position i.
            query_change, key_change: added to queries and keys before the norm, which is computed again.
            biases: biases of queries and keys, so that content (the part on which M acts) is kept apart. Default: not
                kept apart.
        """
        at_query = at_key = None
        if tables is not None and layer.rotary is not None:
            geometry = layer.rotary.of_heads([head])
            cos, sin = (table[head] if table.ndim == 3 else table for table in tables)
            at_query, at_key = (_rotation_at(geometry, cos, sin, rows) for rows in (query_rows, key_rows))
        q_norm, k_norm = (norm and norm.as_(double) for norm in (layer.q_norm, layer.k_norm))
        n_heads, (b_q, b_k) = query.shape[-2], (None, None) if biases is None else biases
        place = head if n_heads > 1 else 0
        return cls(
            layer,
            [head],
            _changed_side(query, query_change, place, b_q, q_norm, at_query, queries=True),
            _changed_side(key, key_change, place * key.shape[-2] // n_heads, b_k, k_norm, at_key),
        )

    def first(self) -> "HeadScores":
        """Return a new `HeadScores` with only the first sequence of the batch."""
        return replace(self, query=self.query.first(), key=self.key.first(), exchanged=None)

    def of_queries(self, rows: slice) -> "HeadScores":
        """Return a new `HeadScores` with the queries at the tokens `rows` and all keys up to the last of them."""
        keys = slice(rows.stop)
        exchanged = HeadScores(self.layer, self.heads, self.query.of_tokens(keys), self.key.of_tokens(rows))
        return replace(self, query=self.query.of_tokens(rows), key=self.key.of_tokens(keys), exchanged=exchanged)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scores, [*batch, heads, queries, keys]."""
        return (*self.query.whole.shape[:-1], self.key.whole.shape[-2])

    def copied(self) -> "HeadScores":
        """Return a copy that shares no tensor with this object, for a user's part that may write into tensors."""
        exchanged = self.exchanged and self.exchanged.copied()
        return HeadScores(self.layer, [*self.heads], self.query.copied(), self.key.copied(), exchanged)

    def in_float32(self) -> "HeadScores":
        """Return a new `HeadScores` with queries and keys in float32."""
        return replace(self, query=self.query.in_float32(), key=self.key.in_float32(), exchanged=None)

    def at_one_position(self) -> "HeadScores":
        """Return a new `HeadScores` with all tokens of a sequence at one position, so that every offset is 0.

        Rotations cancel; factors on cos and sin, gain and phase remain.
        """
        rotation = self.key.rotation
        if rotation is None:
            return self
        at_one = rotation.at_one_position()
        exchanged = self.exchanged and self.exchanged.at_one_position()
        query, key = (replace(side, rotation=at_one) for side in (self.query, self.key))
        return replace(self, query=query, key=key, exchanged=exchanged)

    def of_head(self, index: int) -> "HeadScores":
        """Return a new `HeadScores` with one head only. index: the head's place in `heads`."""
        return HeadScores(self.layer, [self.heads[index]], self.query.of_head(index), self.key.of_head(index))

    def whole(self) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the scaled scores with biases, before softcap, ALiBi and mask."""
        return self.layer.score_scale * self._product(self.query.whole, self.key.whole, 1)

    def inside(self) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the part of the scaled scores that comes from M = W_Q W_K^T: the product without biases."""
        return self.layer.score_scale * self._product(self.query.content, self.key.content, 1)

    def own(self) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the model's own scores before its mask: scaled, with biases, ALiBi and softcap."""
        scores = self.whole()
        if self.layer.alibi is not None:
            bias = self.layer.alibi.bias(torch.arange(scores.shape[-1]))[self.heads]
            scores = scores + bias[:, None].to(scores)
        return softcapped(scores, self.layer.softcap)

    def even(self, *, include_bias: bool = False) -> Float[Tensor, "*batch heads queries keys"]:
        """Return C, the part of the scaled score that is even in the offset: (score + score with negated angles) / 2.

        include_bias: True includes the biases of queries and keys; default: without.
        """
        return self._even(*self._parts(include_bias)).mul_(self.layer.score_scale)

    def symmetric(self, *, include_bias: bool = False) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the symmetric part of the scaled score: (C + C^T)/2, with C the part that is even in the offset.

        include_bias: True includes the biases of queries and keys; default: without.
        """
        content = self._even(*self._parts(include_bias))
        return (self._mirrored(content, include_bias) + content).mul_(self.layer.score_scale / 2)

    def antisymmetric(self, *, include_bias: bool = False) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the antisymmetric part of the scaled score: (C - C^T)/2, with C the part that is even in the offset.

        include_bias: True includes the biases of queries and keys; default: without.
        """
        content = self._even(*self._parts(include_bias))
        return (content - self._mirrored(content, include_bias)).mul_(self.layer.score_scale / 2)

    def phase(
        self, pairs: Bool[Tensor, "pairs"] | None = None, *, include_bias: bool = False
    ) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the part of the scaled score that is odd in the offset: the phase Im(M_t) of the rotary pairs t.

        pairs: mask of rotary pairs, default all. include_bias: True includes the biases of queries and keys; default:
        without.
        """
        queries, keys = self._parts(include_bias)
        forward = self._turning(queries, keys, 1, pairs)
        return forward.sub_(self._turning(queries, keys, -1, pairs)).mul_(self.layer.score_scale / 2)

    def of_pairs(
        self, pairs: Bool[Tensor, "*of_heads pairs"] | None = None
    ) -> Float[Tensor, "*batch heads queries keys"]:
        """Return what some rotary pairs (default: all) add to the scaled score, without biases.

        pairs: a mask [pairs], or [heads, pairs] if it differs by head.
        """
        if pairs is not None and pairs.ndim == 2:
            return torch.cat([self.of_head(index).of_pairs(mask) for index, mask in enumerate(pairs)], dim=1)
        return self._turning(self.query.content, self.key.content, 1, pairs).mul_(self.layer.score_scale)

    def between(self, queries: Tensor, keys: Tensor) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the scaled product of other queries and keys, rotated like the queries and keys of this object.

        queries, keys: [*batch, heads, rows, d_head], at the same rows (tokens) as this object's.
        """
        return self._product(queries, keys, 1).mul_(self.layer.score_scale)

    def turning_between(self, queries: Tensor, keys: Tensor) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the scaled product of these queries and keys over rotary columns only, rotated as in this object.

        queries, keys: [*batch, heads, rows, d_head]. The result is 0 without rotary positions.
        """
        if self.key.rotation is None:
            return torch.zeros_like(queries @ keys.mT)
        return self._turning(queries, keys, 1, None).mul_(self.layer.score_scale)

    def _parts(self, include_bias: bool) -> tuple[Tensor, Tensor]:
        """Return (queries, keys): with biases if include_bias is True, else only the contents on which M acts."""
        query, key = self.query, self.key
        return (query.whole, key.whole) if include_bias else (query.content, key.content)

    def _even(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the part of the products of `queries` and `keys` that is even in the offset (C), not scaled: [*batch,
        heads, queries, keys].
        """
        content = self._product(queries, keys, 1)
        return content if self.key.rotation is None else content.add_(self._product(queries, keys, -1)).div_(2)

    def _mirrored(self, content: Tensor, include_bias: bool) -> Tensor:
        """Return C (the part of the score that is even in the offset) with the two tokens exchanged, not scaled.

        content: C itself, which stays unchanged. include_bias: True if C includes the biases of queries and keys. The
        norms' factors per token are not exchanged: the query's factor stays at the query, the key's at the key.
        """
        other = self if self.exchanged is None else self.exchanged
        back = content if self.exchanged is None else other._even(*other._parts(include_bias))
        if self.query.token_scale is None and self.key.token_scale is None:
            return back.mT
        at_rows = _ratio(self.query.token_scale, other.key.token_scale)
        at_keys = at_rows if other is self else _ratio(other.query.token_scale, self.key.token_scale)
        if at_rows.ndim < content.ndim:
            return back.mT * at_rows[..., :, None] / at_keys[..., None, :]
        queries, keys = other._parts(include_bias)
        return other._even(queries / at_keys, keys * at_rows).mT

    def _product(self, queries: Tensor, keys: Tensor, direction: Literal[1, -1]) -> Tensor:
        """Return the products of `queries` and `keys` over all columns, rotated, not scaled: [*batch, heads, queries,
        keys].

        direction: -1 negates every angle.
        """
        if self.key.rotation is None:
            return queries @ keys.mT
        non_rotary = self.key.rotation.geometry.still_columns.to(queries.device)
        product = self._turning(queries, keys, direction, None)
        return product + queries[..., non_rotary] @ keys[..., non_rotary].mT if len(non_rotary) else product

    def _turning(
        self, queries: Tensor, keys: Tensor, direction: Literal[1, -1], pairs: Bool[Tensor, "pairs"] | None
    ) -> Tensor:
        """Return the products of `queries` and `keys` over the rotary columns of some pairs, rotated, not scaled:
        [*batch, heads, queries, keys].

        direction: -1 negates every angle. pairs: a mask; None: all.
        """
        assert self.query.rotation is not None
        assert self.key.rotation is not None
        mask = slice(None) if pairs is None else pairs
        return self.query.rotation.turned(queries, direction, mask) @ self.key.rotation.turned(keys, direction, mask).mT


def _ratio(at_query: Tensor | None, at_key: Tensor | None) -> Tensor:
    """Return the norm's factor per token of queries over that of keys; None is a factor of 1, and one is a tensor."""
    ratio = (1.0 if at_query is None else at_query) / (1.0 if at_key is None else at_key)
    assert isinstance(ratio, Tensor)
    return ratio


def key_weights(
    scores: Float[Tensor, "*batch queries keys"], visible: Bool[Tensor, "*mask queries keys"]
) -> Float[Tensor, "*batch queries keys"]:
    """Return the attention weights: the softmax of `scores` over the keys that the mask `visible` marks; a row without
    visible keys is 0.
    """
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~visible, lowest).softmax(-1).masked_fill(~visible, 0.0)


# --- from the residual stream and folded weights ---


class RebuiltScores(NamedTuple):
    """Scaled scores of every pair of tokens, rebuilt from the residual stream.

    total: as the model has them before its mask, softcap included.
    inside: the part from M, before the softcap.
    outside: the part from biases and ALiBi, before the softcap.
    """

    total: Float64[Tensor, "batch heads pos pos"]
    inside: Float64[Tensor, "batch heads pos pos"]
    outside: Float64[Tensor, "batch heads pos pos"]


def rebuilt_scores(view: AttentionView, index: int, captured: dict[str, Tensor]) -> RebuiltScores:
    """Return a layer's scores in float64 as `RebuiltScores`, rebuilt from the residual stream that entered it in a run.

    Its fields are `.total` (the scores), `.inside` (from M) and `.outside` (from biases and ALiBi), each [batch, heads,
    pos, pos].

    view: the model. index: the layer. captured: activations of the run, from hook point name to tensor: the layer's
    input, and cos and sin if the layer has these points. Raises UnsupportedArchitecture or BadWeights if the layer
    cannot be read, ScoreMismatch if the model rotates by other angles, ValueError if the prompt is too long for one
    score scale.
    """
    return joined_scores(view.raw(index), scores_of_groups(view, index, captured))


def scores_of_groups(view: AttentionView, index: int, captured: dict[str, Tensor]) -> list[HeadScores]:
    """Return a layer's scores as `rebuilt_scores` does, but not yet computed: a list of `HeadScores`, in the order of
    heads.
    """
    raw = view.raw(index)
    residual = captured[view.hook_names(index)["residual"]]
    require_even_scale(raw, index, residual.shape[-2])
    tables = rotation_tables(view, raw.rotary, index, residual.shape[-2], captured)
    residual = residual.cpu().double()
    # Folded one key/value group at a time, as a large layer takes gigabytes; but a query/key norm over all heads needs
    # them together.
    together = any(norm is not None and norm.over_heads for norm in (raw.q_norm, raw.k_norm))
    by_group = []
    for heads, group in [(slice(None), raw)] if together else key_value_groups(raw):
        group_tables = tables
        if tables is not None and raw.rotary is not None and raw.rotary.per_head:
            group_tables = (tables[0][heads], tables[1][heads])
        by_group.append(HeadScores.of_stream(fold_attention(group, index), residual, group_tables))
    return by_group


def joined_scores(raw: RawAttention, by_group: list[HeadScores]) -> RebuiltScores:
    """Return the scores of all heads of a layer as `RebuiltScores`.

    raw: the layer's settings. by_group: scores of its heads, from `scores_of_groups`, or of some of their queries.
    """
    whole = torch.cat([scores.whole() for scores in by_group], dim=1)
    inside = torch.cat([scores.inside() for scores in by_group], dim=1)
    outside = whole - inside
    if raw.alibi is not None:
        outside = outside + raw.alibi.bias(torch.arange(whole.shape[-1]))[:, None]
    return RebuiltScores(softcapped(inside + outside, raw.softcap), inside, outside)


def rotation_tables(
    view: AttentionView, rotary: RotaryGeometry | None, index: int, n_positions: int, captured: dict[str, Tensor]
) -> tuple[Float64[Tensor, "*heads pos pairs"], Float64[Tensor, "*heads pos pairs"]] | None:
    """Return (cos, sin) per position and rotary pair as the model applied them in a run, each [pos, pairs]; None
    without rotary positions.

    view: the model. rotary: the layer's geometry, whose frequencies the tables must agree with. index: the layer.
    n_positions: tokens of the prompt. captured: activations of the run, from hook point name to tensor. A layer with
    learnable rotary positions has an axis of heads in front. Raises ScoreMismatch if the model rotates by other angles.
    """
    if rotary is None:
        return None
    exact = rotary.position_tables(n_positions)
    tables = view.rotary_tables(index, n_positions, captured)
    if tables is None:
        return exact
    # Without padding all sequences have the same positions.
    cos, sin = (
        per_pair(table.reshape(-1, *exact[0].shape[:-1], table.shape[-1])[0].cpu().double(), rotary) for table in tables
    )
    drift = torch.stack([(cos - exact[0]).abs().max(), (sin - exact[1]).abs().max()]).max()
    limit, advice = rotary.valid_up_to, "the frequencies that were read are wrong: please report this model"
    if limit is not None and n_positions > limit:
        advice = (
            f"the prompt has {n_positions} tokens, and rotary frequencies of this model change past {limit} (LongRoPE, "
            f"dynamic NTK): use prompts of at most {limit} tokens"
        )
    where = f"layer {index}: the model rotates its pairs by other angles than its frequencies give; cos and sin differ"
    require_close(drift, drift, tables[0].dtype, "rotation", where, advice, ScoreMismatch)
    return cos, sin
