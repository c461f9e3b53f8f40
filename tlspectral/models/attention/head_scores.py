"""The scores of a head: queries, keys, and their products.

`HeadScores` has three constructors. `of_stream` computes the sides (queries or keys) from the residual stream with
folded weights in float64. `of_run` takes the queries and keys of a run. `of_rows` takes some rows of one head.

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
from typing import Literal, NamedTuple

import torch
from einops import einsum
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, per_pair
from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention.score_side import (
    Rotation,
    ScoreSide,
    changed_side,
    heads_of,
    key_side,
    keys_read,
    rotation_at,
    run_side,
    side,
)
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.reading.latent import Latent
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
from tlspectral.models.reading.norms import double
from tlspectral.models.reading.view import AttentionView

Tables = tuple[Float[Tensor, "*heads pos pairs"], Float[Tensor, "*heads pos pairs"]]


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
            b_q, b_k = (folded_bias(*projection(layer, what, lambda weight: weight), layer.norm) for what in ("q", "k"))
        select = heads_of if select is None else select
        queries, keys = layer.inputs("query", query), layer.inputs("key", key)
        kv_heads = keys_read(heads, len(b_q), len(b_k))
        key_places = keys_read(heads, len(b_q), keys.projected.shape[2])
        one_side = partial(run_side, rotation=rotation, select=select)
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
            at_query, at_key = (rotation_at(geometry, cos, sin, rows) for rows in (query_rows, key_rows))
        q_norm, k_norm = (norm and norm.as_(double) for norm in (layer.q_norm, layer.k_norm))
        n_heads, (b_q, b_k) = query.shape[-2], (None, None) if biases is None else biases
        place = head if n_heads > 1 else 0
        return cls(
            layer,
            [head],
            changed_side(query, query_change, place, b_q, q_norm, at_query, queries=True),
            changed_side(key, key_change, place * key.shape[-2] // n_heads, b_k, k_norm, at_key),
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
