"""One head's score as a function of the residual streams of two tokens, and its terms for pairs of sources.

With the scale of every norm as a number, the score is bilinear in the two streams. C is its part that is even in the
offset and D the odd one, as in `HeadScores`; for sources a at the query and b at the key,

    symmetric     = (C(a, b) + C(b, a)) / 2
    antisymmetric = (C(a, b) - C(b, a)) / 2
    phase         = D(a, b)

C(b, a) exchanges the vectors of the two tokens, each with the factor of the norm in front of the attention. The factors
of a query/key norm stay at query and key.
"""

from collections.abc import Set
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, with_gain_and_phase
from tlspectral.models.attention.head_scores import Tables
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import LayerSettings, RawAttention, fold_attention, key_value_groups, softcapped
from tlspectral.models.reading.norms import QueryKeyNorm
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.writes import LayerReads

PARTS = ("symmetric", "antisymmetric", "phase", "outside_m")


@dataclass(frozen=True)
class StreamSide:
    """The queries or keys of a head, of heads that share its query/key norm where the norm's mean runs over them.

    `reads` and `bias` are the folded projection of the residual stream, `query_key_norm` is behind it.
    """

    reads: LayerReads
    bias: Float64[Tensor, "heads d_head"]
    query_key_norm: QueryKeyNorm | Latent | None
    head: int

    def of(self, x: Float64[Tensor, "*batch d_model"], *, bias: bool = True) -> Float64[Tensor, "*batch d_head"]:
        """Return the head's query or key of whole streams, all norms taken at them."""
        every = self._projected(x, bias)
        return (every if self.query_key_norm is None else self.query_key_norm.applied(every))[..., self.head, :]

    def scale(self, x: Float64[Tensor, "d_model"]) -> Float64[Tensor, ""] | None:
        """Return the factor 1/rms of the query/key norm at a stream; None without such a norm."""
        norm = self.query_key_norm
        return None if norm is None else norm.token_scale(self._projected(x, bias=True))[..., self.head]

    def normed(self, rows: Float64[Tensor, "rows d_head"], scale: Tensor | None) -> Float64[Tensor, "rows d_head"]:
        """Return rows behind the query/key norm with its factor as given, one or one per row; as they are without."""
        if self.query_key_norm is None or scale is None:
            return rows
        norm = self.query_key_norm
        if norm.gain is not None and norm.gain.ndim == 2:  # one gain serves several heads, if they share it
            norm = norm.of_heads([self.head * len(norm.gain) // len(self.reads.weight)])
        return norm.applied(rows[:, None], scale.expand(len(rows))[:, None])[:, 0]

    def _projected(self, x: Tensor, bias: bool) -> Tensor:
        heads = self.reads.of(x)
        return heads + self.bias if bias else heads


@dataclass(frozen=True)
class HeadForm:
    """One head at a query and a key position: how its scaled score, before softcap and mask, depends on two streams.

    `rotary` are the pairs of this head, with gain and phase of a spectral layer; `even` and `odd` cos and sin of the
    offset from key to query, per pair, as the model applied them.
    """

    layer: LayerSettings
    head: int
    query: StreamSide
    key: StreamSide
    rotary: RotaryGeometry | None
    even: Float64[Tensor, "pairs"]
    odd: Float64[Tensor, "pairs"]

    @property
    def slope(self) -> float | None:
        """Slope of ALiBi, None without it."""
        return None if self.layer.alibi is None else self.layer.alibi.slopes[self.head]

    def capped(self, score: Tensor) -> Tensor:
        """Return scores as the softmax has them, behind the softcap."""
        return softcapped(score, self.layer.softcap)

    def with_gain(self, queries: Float64[Tensor, "rows d_head"]) -> Float64[Tensor, "rows d_head"]:
        """Return queries times the gain and phase of a spectral layer; as they are elsewhere."""
        return queries if self.rotary is None else with_gain_and_phase(queries[None], self.rotary)[0]

    def even_keys(self, keys: Float64[Tensor, "rows d_head"]) -> Float64[Tensor, "rows d_head"]:
        """Return keys whose product with a query is C of the pair."""
        weight = keys.new_full(keys.shape[-1:], self.layer.score_scale)
        if self.rotary is not None:
            for columns in (self.rotary.real_index, self.rotary.imag_index):
                weight[columns] *= self.even
        return weight * keys

    def odd_keys(self, keys: Float64[Tensor, "rows d_head"]) -> Float64[Tensor, "rows d_head"]:
        """Return keys whose product with a query is D of the pair."""
        rotated = torch.zeros_like(keys)
        if self.rotary is not None:
            real, imag = self.rotary.real_index, self.rotary.imag_index
            rotated[:, real], rotated[:, imag] = self.odd * keys[:, imag], -self.odd * keys[:, real]
        return self.layer.score_scale * rotated

    def score(
        self, queries: Float64[Tensor, "rows d_head"], keys: Float64[Tensor, "rows d_head"]
    ) -> Float64[Tensor, "rows"]:
        """Return the score of each query and key (as of `StreamSide.of`), without ALiBi."""
        return (self.with_gain(queries) * (self.even_keys(keys) + self.odd_keys(keys))).sum(-1)


def head_form(view: AttentionView, index: int, head: int, query: int, key: int, tables: Tables | None) -> HeadForm:
    """Return the form of one head, given cos and sin as the run applied them (`rotation_tables`)."""
    raw = view.raw(index)
    group, first = _readable_group(raw, head)
    layer = fold_attention(group, index)
    even = odd = layer.b_q.new_zeros(0)
    if tables is not None:
        cos, sin = (table[head] if table.ndim == 3 else table for table in tables)
        even = cos[query] * cos[key] + sin[query] * sin[key]
        odd = sin[query] * cos[key] - cos[query] * sin[key]
    return HeadForm(
        raw,
        head,
        StreamSide(LayerReads(layer.norm, layer.w_q), layer.b_q, layer.q_norm, head - first),
        StreamSide(LayerReads(layer.norm, layer.w_k), layer.b_k, layer.k_norm, layer.kv_head(head - first)),
        raw.rotary and raw.rotary.of_heads([head]),
        even,
        odd,
    )


def _readable_group(raw: RawAttention, head: int) -> tuple[RawAttention, int]:
    """Return the key/value group of a head and its first head: all heads where a query/key norm runs over them."""
    if any(norm is not None and norm.over_heads for norm in (raw.q_norm, raw.k_norm)):
        return raw, 0
    return next((group, heads.start) for heads, group in key_value_groups(raw) if head < heads.stop)


def pair_parts(
    form: HeadForm, written: Float64[Tensor, "two sources d_model"], residual: Float64[Tensor, "two d_model"]
) -> tuple[Float64[Tensor, "parts queries keys"], tuple[bool, bool]]:
    """Return the four `PARTS` of every pair of sources, and whether the query and the key have a bias.

    The streams `residual` of the two tokens are sums of what was `written`, and all norms have the scales that they
    have there. Rows are sources at the query, columns at the key; the bias of the projection is the last source.
    """
    query, key = form.query, form.key
    at_query, at_key = query.scale(residual[0]), key.scale(residual[1])
    zero = form.query.bias.new_zeros(1, form.query.bias.shape[-1])

    def terms(side: StreamSide, token: int, scale: Tensor | None, bias: Tensor) -> Tensor:
        read = (side.reads.norm.token_scale(residual[token]) * written[token]) @ side.reads.weight[side.head]
        return side.normed(torch.cat([read, bias]), scale)

    q = form.with_gain(terms(query, 0, at_query, query.bias[query.head][None]))
    k = terms(key, 1, at_key, key.bias[key.head][None])
    content, phase = q @ form.even_keys(k).T, q @ form.odd_keys(k).T
    # The same sources read by the other side, for C(b, a).
    k_of_query, q_of_key = terms(key, 0, at_key, zero), form.with_gain(terms(query, 1, at_query, zero))
    mirrored = form.even_keys(k_of_query) @ q_of_key.T
    parts = torch.stack([(content + mirrored) / 2, (content - mirrored) / 2, phase, content + phase])
    parts[3, :-1, :-1] = 0.0
    parts[:3, -1] = parts[:3, :, -1] = 0.0
    return parts, (bool(q[-1].any()), bool(k[-1].any()))


def removed_pairs(
    form: HeadForm,
    written: Float64[Tensor, "two sources d_model"],
    residual: Float64[Tensor, "two d_model"],
    pairs: Int[Tensor, "pairs two"],
) -> Float64[Tensor, "pairs"]:
    """Return S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b) of each pair of sources (a, b).

    The source behind the last written one is the bias of the projection: that projection then has none.
    """
    queries = _without(form.query, residual[0], written[0], pairs[:, 0])
    keys = _without(form.key, residual[1], written[1], pairs[:, 1])
    query, key = form.query.of(residual[0]).expand_as(queries), form.key.of(residual[1]).expand_as(keys)
    score = form.score
    return score(query, key) - score(queries, key) - score(query, keys) + score(queries, keys)


def removed_key_sources(
    form: HeadForm,
    written: Float64[Tensor, "two sources d_model"],
    residual: Float64[Tensor, "two d_model"],
    sources: Set[int],
) -> Float64[Tensor, ""]:
    """Return S(x, y) - S(x, y - sum of the sources): what the score loses without all of them in the key."""
    n_sources = written.shape[1]
    gone = [source for source in sources if source < n_sources]
    key = form.key.of(residual[1] - written[1, gone].sum(0), bias=n_sources not in sources)
    query = form.query.of(residual[0])[None]
    return (form.score(query, form.key.of(residual[1])[None]) - form.score(query, key[None]))[0]


def _without(
    side: StreamSide, x: Float64[Tensor, "d_model"], written: Float64[Tensor, "sources d_model"], sources: Tensor
) -> Float64[Tensor, "pairs d_head"]:
    removed = torch.cat([written, torch.zeros_like(written[:1])])[sources]
    is_bias = (sources == len(written))[:, None]
    return torch.where(is_bias, side.of(x, bias=False), side.of(x - removed))
