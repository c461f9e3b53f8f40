"""The score of a head: its two sides, queries and keys, and every product of them.

A side is what enters the score behind a query/key norm, gain and phase, before any rotation. `HeadScores` has three
makers: `of_stream` reads the residual stream with folded weights in float64, `of_run` takes the queries and keys of a
run, `of_rows` some rows of queries and keys of one head. With `S+` the score with the model's own rotations and `S-`
the same with every angle negated,

    C = (S+ + S-) / 2     even in the offset: Re(M_t) and columns that do not turn
    D = (S+ - S-) / 2     odd in the offset: Im(M_t)

so that the symmetric part (C + C^T)/2, the antisymmetric part (C - C^T)/2 and D sum to the score. `at_one_position`
gives the C of the two tokens at offset 0, whose parts are the parts of the static M. All are matrices over pairs of
tokens, without a loop over frequencies and without a d_model x d_model matrix (FP, sections 5, 8 and 10).
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
    """The rotary pairs of a layer with cos and sin at some rows, as a run applied them or in float64.

    Tables are [(batch,) rows, pairs], or with an axis of heads (1 where all are alike) in front of the rows. Tables of
    a spectral layer always have it, for the heads of the geometry.
    """

    geometry: RotaryGeometry
    cos: Float[Tensor, "*batch rows pairs"]
    sin: Float[Tensor, "*batch rows pairs"]

    def of_heads(self, heads: list[int]) -> "Rotation":
        """Return the rotation of some query heads of a spectral layer, in the given order; an ordinary one as it is."""
        if not self.geometry.per_head:
            return self
        return Rotation(self.geometry.of_heads(heads), self.cos[..., heads, :, :], self.sin[..., heads, :, :])

    def at_one_position(self) -> "Rotation":
        """Return the rotation in which every row has the position of the first one."""
        return replace(self, cos=self.cos[..., :1, :], sin=self.sin[..., :1, :])

    def turned(
        self, x: Float[Tensor, "*batch heads rows d_head"], direction: Literal[1, -1], pairs: Any
    ) -> Float[Tensor, "*batch heads rows columns"]:
        """Return the columns of some pairs, each rotated by its angle, or the other way for direction -1."""
        real, imag = (index.to(x.device)[pairs] for index in (self.geometry.real_index, self.geometry.imag_index))
        cos, sin = (self._per_head(table).to(x)[..., pairs] for table in (self.cos, direction * self.sin))
        return torch.cat(times_phase(x[..., real], x[..., imag], cos, sin), dim=-1)

    def _per_head(self, table: Tensor) -> Tensor:
        return table[:, None] if table.ndim == 3 and not self.geometry.per_head else table


@dataclass(frozen=True)
class ScoreSide(Castable):
    """Queries or keys of some heads, as they enter the score before any rotation.

    Attributes:
        whole: with bias.
        content: without bias, what M acts on.
        token_scale: factor of norms behind the projection, 1/rms, None without one: per token, [*batch, heads, rows],
            or per token and column, [*batch, heads, rows, d_head], where blocks of columns have norms of their own.
        rotation: cos and sin at the rows, None without rotary positions.
    """

    whole: Float[Tensor, "*batch heads rows d_head"]
    content: Float[Tensor, "*batch heads rows d_head"]
    token_scale: Float[Tensor, "*batch_heads_rows_columns"] | None
    rotation: Rotation | None

    def first(self) -> "ScoreSide":
        """Return the side of the first sequence of a batch."""
        rotation = self.rotation
        if rotation is not None and rotation.cos.ndim == rotation.geometry.theta.ndim + 2:
            rotation = rotation.as_(lambda table: table[:1])
        return replace(self.as_(lambda part: part[:1]), rotation=rotation)

    def copied(self) -> "ScoreSide":
        """Return the side on tensors of its own."""
        return replace(self.as_(Tensor.clone), rotation=self.rotation and self.rotation.as_(Tensor.clone))

    def in_float32(self) -> "ScoreSide":
        """Return the side in float32."""
        return replace(self.as_(Tensor.float), rotation=self.rotation and self.rotation.as_(Tensor.float))

    def of_head(self, index: int) -> "ScoreSide":
        """Return the side of one of the heads, of tensors [batch, heads, ...]."""
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
    """Return a side from queries or keys of some heads, as they are before a query/key norm, in float32 at least.

    `bias` is None where there is none to tell apart. A spectral layer's gain and phase, which are in the rotation's
    geometry, act on `queries`. `token_scale` is 1/rms, [*batch, rows, heads], where the norm takes its mean over other
    heads too; the 1/rms of a latent is for each column, [*batch, rows, heads, d_head].
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
    """Return the key side of all query heads of a layer from the keys that they share, else as `side`."""
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
    """Return one side of some heads: `places` index the captured tensor, `heads` the weights."""
    selected, scale = select(captured.projected, places), captured.token_scale
    if norm is not None and norm.over_heads:  # its mean runs over other heads too
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
    """Return the side of one head whose queries or keys change before the norm; the other heads keep theirs.

    `projected` and `change` are of all heads: a norm whose mean runs over them is taken again.
    """
    changed = projected[..., [head], :] if change is None else projected[..., [head], :] + change[..., [head], :]
    scale = None
    if norm is not None and norm.over_heads:
        every = projected.expand(*changed.shape[:-2], *projected.shape[-2:]).clone()
        every[..., [head], :] = changed
        scale = norm.token_scale(every)[..., [head]]
    if norm is not None and norm.gain is not None and norm.gain.ndim == 2:  # some models repeat keys, gains they do not
        norm = norm.of_heads([head * len(norm.gain) // projected.shape[-2]])
    return side(changed, bias, norm, rotation, queries=queries, token_scale=scale)


def _rotation_at(geometry: RotaryGeometry, cos: Tensor, sin: Tensor, rows: Tensor | None) -> Rotation:
    """Return the rotation of one head at some rows, which may differ by sequence (None: at all)."""
    if rows is None:
        return Rotation(geometry, cos, sin)
    if rows.ndim == 1:
        return Rotation(geometry, cos[rows], sin[rows])
    return Rotation(geometry, cos[rows][:, None], sin[rows][:, None])


def keys_read(heads: list[int], n_heads: int, n_keys: int) -> list[int]:
    """Return which of the keys or values of a layer some query heads read: shared in groups, or one per query head."""
    return [head // (n_heads // n_keys) for head in heads]


def _heads_of(tensor: Tensor, heads: list[int]) -> Tensor:
    return tensor[:, :, heads]


def _as_stored(weight: Tensor) -> Tensor:
    return weight


@dataclass(frozen=True)
class HeadScores:
    """Scores of some heads of a layer, [*batch, heads, queries, keys].

    Attributes:
        layer: what the layer has beside its weights.
        heads: their indices in the layer. Jobs that are stacked on the batch (head i of copy i) take its place.
        query, key: the two sides.
    """

    layer: LayerSettings
    heads: list[int]
    query: ScoreSide
    key: ScoreSide

    @classmethod
    def of_stream(
        cls, layer: AttentionLayer, residual: Float64[Tensor, "batch pos d_model"], tables: Tables | None
    ) -> "HeadScores":
        """Return the scores of all heads of a folded layer from the residual stream that enters it, in float64.

        `tables` are cos and sin of each pair, of a spectral layer per query head.
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
        """Return the scores of some heads from what passes the hook points of queries and keys in a run.

        `rotation` is of these heads (`Rotation.of_heads`). Gradients reach biases and gains of a `RawAttention`, while
        a folded layer has copies. `select(tensor, heads)` takes heads from a tensor [batch, pos, heads, ...]. Default:
        the same heads from the whole batch.
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
        """Return `HeadScores` of one head, for some queries and keys, each at a position that the caller gives.

        Args:
            query, key: queries and keys before the query/key norm and before rotation, of all heads of the layer; keys
                may be repeated per query head. A layer without such a norm needs this head alone.
            tables: cos and sin of each rotary pair at all positions; of a spectral layer for each head.
            query_rows, key_rows: the position of each query and key. One position stands for all of them; without
                `key_rows` key i stands at position i.
            query_change, key_change: added to queries and keys in front of the norm, which is computed again.
            biases: the biases of queries and keys, to keep them apart from what M makes of the stream. Default: they
                are not kept apart.
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
        """Return the scores of the first sequence of a batch."""
        return replace(self, query=self.query.first(), key=self.key.first())

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the scores, [*batch, heads, queries, keys]."""
        return (*self.query.whole.shape[:-1], self.key.whole.shape[-2])

    def copied(self) -> "HeadScores":
        """Return the scores on queries, keys and rotations of their own, for a user's part that may write into them."""
        return HeadScores(self.layer, [*self.heads], self.query.copied(), self.key.copied())

    def in_float32(self) -> "HeadScores":
        """Return the scores in float32."""
        return replace(self, query=self.query.in_float32(), key=self.key.in_float32())

    def at_one_position(self) -> "HeadScores":
        """Return the scores of the same rows at queries and keys, all tokens of a sequence at one position.

        Every pair then has offset 0: rotations cancel, and factors on cos and sin, gain and phase stay.
        """
        rotation = self.key.rotation
        if rotation is None:
            return self
        at_one = rotation.at_one_position()
        return replace(self, query=replace(self.query, rotation=at_one), key=replace(self.key, rotation=at_one))

    def of_head(self, index: int) -> "HeadScores":
        """Return the scores of one of the heads."""
        return HeadScores(self.layer, [self.heads[index]], self.query.of_head(index), self.key.of_head(index))

    def whole(self) -> Float[Tensor, "*batch heads queries keys"]:
        """Return scaled scores with biases, before softcap, ALiBi and mask."""
        return self.layer.score_scale * self._product(self.query.whole, self.key.whole, 1)

    def inside(self) -> Float[Tensor, "*batch heads queries keys"]:
        """Return what M gives of `whole`: the product without biases."""
        return self.layer.score_scale * self._product(self.query.content, self.key.content, 1)

    def own(self) -> Float[Tensor, "*batch heads queries keys"]:
        """Return scores as the model has them before its mask: `whole` with ALiBi, behind the softcap."""
        scores = self.whole()
        if self.layer.alibi is not None:
            bias = self.layer.alibi.bias(torch.arange(scores.shape[-1]))[self.heads]
            scores = scores + bias[:, None].to(scores)
        return softcapped(scores, self.layer.softcap)

    def even(self, *, include_bias: bool = False) -> Float[Tensor, "*batch heads queries keys"]:
        """Return C, scaled."""
        return self._even(*self._parts(include_bias)).mul_(self.layer.score_scale)

    def symmetric(self, *, include_bias: bool = False) -> Float[Tensor, "*batch heads queries keys"]:
        """Return (C + C^T)/2, scaled."""
        content = self._even(*self._parts(include_bias))
        return (self._mirrored(content, include_bias) + content).mul_(self.layer.score_scale / 2)

    def antisymmetric(self, *, include_bias: bool = False) -> Float[Tensor, "*batch heads queries keys"]:
        """Return (C - C^T)/2, scaled."""
        content = self._even(*self._parts(include_bias))
        return (content - self._mirrored(content, include_bias)).mul_(self.layer.score_scale / 2)

    def phase(
        self, pairs: Bool[Tensor, "pairs"] | None = None, *, include_bias: bool = False
    ) -> Float[Tensor, "*batch heads queries keys"]:
        """Return D, scaled, of all rotary pairs or of some."""
        queries, keys = self._parts(include_bias)
        forward = self._turning(queries, keys, 1, pairs)
        return forward.sub_(self._turning(queries, keys, -1, pairs)).mul_(self.layer.score_scale / 2)

    def of_pairs(
        self, pairs: Bool[Tensor, "*of_heads pairs"] | None = None
    ) -> Float[Tensor, "*batch heads queries keys"]:
        """Return what the contents of all rotary pairs or of some contribute, scaled; a mask may differ by head."""
        if pairs is not None and pairs.ndim == 2:
            return torch.cat([self.of_head(index).of_pairs(one) for index, one in enumerate(pairs)], dim=1)
        return self._turning(self.query.content, self.key.content, 1, pairs).mul_(self.layer.score_scale)

    def between(self, queries: Tensor, keys: Tensor) -> Float[Tensor, "*batch heads queries keys"]:
        """Return the scaled product of other queries and keys at the same rows, rotated as the sides are."""
        return self._product(queries, keys, 1).mul_(self.layer.score_scale)

    def turning_between(self, queries: Tensor, keys: Tensor) -> Float[Tensor, "*batch heads queries keys"]:
        """Return `between` of the rotary columns alone; 0 without rotary positions."""
        if self.key.rotation is None:
            return torch.zeros_like(queries @ keys.mT)
        return self._turning(queries, keys, 1, None).mul_(self.layer.score_scale)

    def _parts(self, include_bias: bool) -> tuple[Tensor, Tensor]:
        query, key = self.query, self.key
        return (query.whole, key.whole) if include_bias else (query.content, key.content)

    def _even(self, queries: Tensor, keys: Tensor) -> Tensor:
        content = self._product(queries, keys, 1)
        return content if self.key.rotation is None else content.add_(self._product(queries, keys, -1)).div_(2)

    def _mirrored(self, content: Tensor, include_bias: bool) -> Tensor:
        """Return C of the two tokens exchanged. The factors of norms behind the projections stay at query and key."""
        at_query, at_key = self.query.token_scale, self.key.token_scale
        if at_query is None and at_key is None:
            return content.mT
        ratio = (1.0 if at_query is None else at_query) / (1.0 if at_key is None else at_key)
        assert isinstance(ratio, Tensor)
        if ratio.ndim < content.ndim:
            return content.mT * ratio[..., :, None] / ratio[..., None, :]
        queries, keys = self._parts(include_bias)
        return self._even(queries / ratio, keys * ratio).mT

    def _product(self, queries: Tensor, keys: Tensor, direction: Literal[1, -1]) -> Tensor:
        """Return unscaled products of queries and keys, non-rotary columns among them."""
        if self.key.rotation is None:
            return queries @ keys.mT
        non_rotary = self.key.rotation.geometry.still_columns.to(queries.device)
        product = self._turning(queries, keys, direction, None)
        return product + queries[..., non_rotary] @ keys[..., non_rotary].mT if len(non_rotary) else product

    def _turning(
        self, queries: Tensor, keys: Tensor, direction: Literal[1, -1], pairs: Bool[Tensor, "pairs"] | None
    ) -> Tensor:
        """Return unscaled products over the rotary columns alone, of all pairs or of some."""
        assert self.query.rotation is not None
        assert self.key.rotation is not None
        mask = slice(None) if pairs is None else pairs
        return self.query.rotation.turned(queries, direction, mask) @ self.key.rotation.turned(keys, direction, mask).mT


def key_weights(
    scores: Float[Tensor, "*batch queries keys"], visible: Bool[Tensor, "*mask queries keys"]
) -> Float[Tensor, "*batch queries keys"]:
    """Return the softmax of scores over visible keys; rows that see no key are 0."""
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~visible, lowest).softmax(-1).masked_fill(~visible, 0.0)


# --- from the residual stream and folded weights ---


class RebuiltScores(NamedTuple):
    """Scaled scores of every pair of tokens: as the model has them before its mask, and parts before a softcap.

    The parts are those from M (`inside`) and from biases and ALiBi (`outside`).
    """

    total: Float64[Tensor, "batch heads pos pos"]
    inside: Float64[Tensor, "batch heads pos pos"]
    outside: Float64[Tensor, "batch heads pos pos"]


def rebuilt_scores(view: AttentionView, index: int, captured: dict[str, Tensor]) -> RebuiltScores:
    """Return a layer's scores in float64 from what its hook points "residual" and any "cos" and "sin" saw.

    Raises as `AttentionView.layer`, `rotation_tables` and `require_even_scale`.
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
        scores = HeadScores.of_stream(fold_attention(group, index), residual, group_tables)
        by_group.append((scores.whole(), scores.inside()))
    whole, inside = (torch.cat(terms, dim=1) for terms in zip(*by_group, strict=True))
    outside = whole - inside
    if raw.alibi is not None:
        outside = outside + raw.alibi.bias(torch.arange(residual.shape[-2]))[:, None]
    return RebuiltScores(softcapped(inside + outside, raw.softcap), inside, outside)


def rotation_tables(
    view: AttentionView, rotary: RotaryGeometry | None, index: int, n_positions: int, captured: dict[str, Tensor]
) -> tuple[Float64[Tensor, "*heads pos pairs"], Float64[Tensor, "*heads pos pairs"]] | None:
    """Return the model's own cos and sin per pair (and spectral head), checked against the geometry's frequencies.

    Raises ScoreMismatch where the model rotates its pairs by other angles.
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
    limit, advice = rotary.valid_up_to, "its frequencies are read wrongly, so nothing is computed from them"
    if limit is not None and n_positions > limit:
        advice = (
            f"the prompt has {n_positions} tokens, and rotary frequencies of this model change past {limit} (LongRoPE, "
            f"dynamic NTK): the operators are those of prompts of at most {limit} tokens, so use such prompts"
        )
    where = f"layer {index}: the model rotates its pairs by other angles than its frequencies say; cos and sin differ"
    require_close(drift, drift, tables[0].dtype, "rotation", where, advice, ScoreMismatch)
    return cos, sin
