"""One head's score as a bilinear function of the residual streams of two tokens, divided among terms of the streams.

The scale of every norm is held at its value in the run. C is the part of the score that is even in the distance of the
two tokens, D the odd part (`HeadScores`). For a term a at the query and a term b at the key,

    symmetric     = (C(a, b) + C(b, a)) / 2
    antisymmetric = (C(a, b) - C(b, a)) / 2
    phase         = D(a, b)

C(b, a) exchanges the vectors of the two tokens, each with the scale of its norm in front of the attention. The scales
of a query/key norm are not exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.models.attention.head_scores import HeadScores, Tables
from tlspectral.models.reading.latent import Latent
from tlspectral.models.reading.layer import LayerSettings, RawAttention, fold_attention, key_value_groups
from tlspectral.models.reading.norms import QueryKeyNorm
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.writes import LayerReads

PARTS = ("symmetric", "antisymmetric", "phase", "outside_m")
"""The four parts of a score; `outside_m` are terms with biases, and ALiBi."""


@dataclass(frozen=True)
class StreamSide:
    """The query or the key of a head as a function of the residual stream.

    Attributes:
        reads: the projection of the stream, norm folded in, for the heads of a group (all heads if the query/key norm
            takes its mean over heads).
        query_key_norm: the norm behind the projection, None without one.
        head: index of the head in `reads`.
    """

    reads: LayerReads
    query_key_norm: QueryKeyNorm | Latent | None
    head: int

    def row(self, x: Float64[Tensor, "*batch d_model"], *, bias: bool = True) -> Float64[Tensor, "*batch d_head"]:
        """Return the head's query or key for whole streams x, before rotation, with every norm computed on x.

        `bias`: False leaves the bias of the projection out.
        """
        of_group = (self.reads if bias else replace(self.reads, bias=None)).from_stream(x)
        normed = of_group if self.query_key_norm is None else self.query_key_norm.applied(of_group)
        return normed[..., self.head, :]

    def scale(self, x: Float64[Tensor, "d_model"]) -> Float64[Tensor, ""] | None:
        """Return the scale 1/rms of the query/key norm for a stream x; None without such a norm."""
        norm = self.query_key_norm
        return None if norm is None else norm.token_scale(self.reads.from_stream(x))[..., self.head]

    def of_terms(
        self, written: Float64[Tensor, "terms d_model"], x: Float64[Tensor, "d_model"], scale: Tensor | None
    ) -> Float64[Tensor, "terms d_head"]:
        """Return the query or key that the head makes of each term of a stream x, norms held at their scale for x.

        `written` are the terms, `scale` the scale of the query/key norm for x (from `scale`; None without such a norm).
        Biases are left out.
        """
        read = (self.reads.norm.token_scale(x) * written) @ self.reads.weight[self.head]
        return self._normed(read, scale)

    def own_bias(self, scale: Tensor | None) -> Float64[Tensor, "one d_head"]:
        """Return the head's bias of queries or keys after the query/key norm, held at `scale`.

        `scale` is None without such a norm.
        """
        assert self.reads.bias is not None
        return self._normed(self.reads.bias[self.head][None], scale)

    def _normed(self, rows: Float64[Tensor, "rows d_head"], scale: Tensor | None) -> Float64[Tensor, "rows d_head"]:
        """Return queries or keys after the query/key norm, held at `scale`; unchanged without such a norm.

        `rows` are queries or keys of the head before the norm. `scale` is None without such a norm.
        """
        if self.query_key_norm is None or scale is None:
            return rows
        norm = self.query_key_norm
        if norm.gain is not None and norm.gain.ndim == 2:  # one gain serves several heads, if they share it
            norm = norm.of_heads([self.head * len(norm.gain) // len(self.reads.weight)])
        return norm.applied(rows[:, None], scale.expand(len(rows))[:, None])[:, 0]


@dataclass(frozen=True)
class HeadForm:
    """The scaled score of one head for a query and a key position, before softcap and mask, as a function of streams.

    Attributes:
        layer: settings of the layer, without query/key norms (these are in `query` and `key`).
        head: index of the head in the layer.
        query, key: the query and the key as functions of the residual stream.
        tables: cos and sin at the query (row 0) and at the key (row 1), as the model applied them; None without rotary
            positions.
    """

    layer: LayerSettings
    head: int
    query: StreamSide
    key: StreamSide
    tables: Tables | None

    @property
    def slope(self) -> float | None:
        """The head's ALiBi slope; None without ALiBi."""
        return None if self.layer.alibi is None else self.layer.alibi.slopes[self.head]

    def scores(
        self,
        queries: Float64[Tensor, "*batch queries d_head"],
        keys: Float64[Tensor, "*batch keys d_head"],
        biases: tuple[Tensor, Tensor] | None = None,
        *,
        exchanged: bool = False,
    ) -> HeadScores:
        """Return the scores of each query with each key, as `HeadScores` with one head.

        Scores are scaled, before softcap and mask. All queries stand at the query's position, all keys at the key's.

        Args:
            queries, keys: queries and keys before rotation.
            biases: the part of queries and of keys that is a bias. Default: None, no bias.
            exchanged: True places queries at the key's position and keys at the query's position.
        """
        places = [torch.tensor([row]) for row in ((1, 0) if exchanged else (0, 1))]
        at_query, at_key = (rows[..., None, :] for rows in (queries, keys))
        of_bias = None if biases is None else (biases[0][..., None, :], biases[1][..., None, :])
        return HeadScores.of_rows(self.layer, self.head, at_query, at_key, self.tables, *places, biases=of_bias)

    def score(
        self, queries: Float64[Tensor, "rows d_head"], keys: Float64[Tensor, "rows d_head"]
    ) -> Float64[Tensor, "rows"]:
        """Return the scaled score of each query with the key in the same row, without ALiBi.

        `queries` and `keys` are vectors before rotation, with bias, as `StreamSide.row` returns them.
        """
        return self.scores(queries[:, None], keys[:, None]).whole()[:, 0, 0, 0]


def head_form(view: AttentionView, index: int, head: int, query: int, key: int, tables: Tables | None) -> HeadForm:
    """Return the function that gives a head's score from two residual streams, for the positions `query` and `key`.

    The result is a `HeadForm` with weights in float64. `view` is the model, `index` the layer. `tables` are cos and sin
    at all positions, as the run applied them; None without rotary positions.
    """
    raw = view.raw(index)
    group, first = readable_group(raw, head)
    layer = fold_attention(group, index)
    return HeadForm(
        replace(raw.without_weights(), q_norm=None, k_norm=None),
        head,
        StreamSide(LayerReads(layer.norm, layer.w_q, layer.b_q), layer.q_norm, head - first),
        StreamSide(LayerReads(layer.norm, layer.w_k, layer.b_k), layer.k_norm, layer.kv_head(head - first)),
        None if tables is None else (tables[0][..., [query, key], :], tables[1][..., [query, key], :]),
    )


def readable_group(raw: RawAttention, head: int) -> tuple[RawAttention, int]:
    """Return the weights of the key/value group of a head, and the index of the group's first head in the layer.

    `raw` are the weights of the layer. A group are the heads that share keys and values. If a query/key norm takes its
    mean over all heads, return the whole layer and 0.
    """
    if any(norm is not None and norm.over_heads for norm in (raw.q_norm, raw.k_norm)):
        return raw, 0
    return next((group, heads.start) for heads, group in key_value_groups(raw) if head < heads.stop)


def pair_parts(
    form: HeadForm,
    at_query: Float64[Tensor, "a d_model"],
    at_key: Float64[Tensor, "b d_model"],
    residual: Float64[Tensor, "two d_model"],
    columns: Float64[Tensor, "groups d_head"] | None = None,
) -> tuple[Float64[Tensor, "*groups parts queries keys"], tuple[bool, bool]]:
    """Return four parts of the score for every pair of terms, and whether the query and the key have a bias.

    Args:
        form: the head's score as a function of the two streams.
        at_query, at_key: terms of the two streams.
        residual: the streams of query and key, at which the norms are held.
        columns: masks over the columns of the head; with them the result has one table for each mask.

    Returns:
        The parts as [parts, query terms + 1, key terms + 1], in logits; the last term of query and key is the bias. The
        parts are M_S, M_A, Im(M_t), and `outside_m` (terms with biases, and ALiBi). Behind it two booleans: the query
        has a bias, the key has a bias.
    """
    query, key = form.query, form.key
    of_query, of_key = query.scale(residual[0]), key.scale(residual[1])
    q, k = query.of_terms(at_query, residual[0], of_query), key.of_terms(at_key, residual[1], of_key)
    # For C(b, a): queries made of the key's terms, and keys made of the query's terms.
    q_of_key, k_of_query = query.of_terms(at_key, residual[1], of_query), key.of_terms(at_query, residual[0], of_key)
    b_q, b_k = query.own_bias(of_query), key.own_bias(of_key)
    biased = bool(b_q.any()), bool(b_k.any())
    if columns is not None:
        q, k, q_of_key, k_of_query, b_q, b_k = (
            rows * columns[:, None] for rows in (q, k, q_of_key, k_of_query, b_q, b_k)
        )
    whole = [torch.cat(rows, dim=-2) for rows in ((q, b_q), (k, b_k))]
    biases = [torch.cat([torch.zeros_like(rows), bias], dim=-2) for rows, bias in ((q, b_q), (k, b_k))]
    scores = form.scores(*whole, biases=(biases[0], biases[1]))
    even = scores.even()[..., 0, :, :]
    mirrored = torch.zeros_like(even)
    mirrored[..., :-1, :-1] = form.scores(q_of_key, k_of_query, exchanged=True).even()[..., 0, :, :].mT
    outside = scores.whole()[..., 0, :, :]
    outside[..., :-1, :-1] = 0.0
    odd = torch.zeros_like(even) if form.tables is None else scores.phase()[..., 0, :, :]
    return torch.stack([(even + mirrored) / 2, (even - mirrored) / 2, odd, outside], dim=-3), biased


def removed_pairs(
    form: HeadForm,
    at_query: Float64[Tensor, "a d_model"],
    at_key: Float64[Tensor, "b d_model"],
    residual: Float64[Tensor, "two d_model"],
    pairs: Int[Tensor, "pairs two"],
) -> Float64[Tensor, "pairs"]:
    """Return the score that is lost without each pair of terms (a, b), in logits, with norms computed again.

    It is S(x, y) - S(x - a, y) - S(x, y - b) + S(x - a, y - b): S is the score (`form`), x and y are the streams of
    query and key (`residual`). `pairs` are indices into the terms at_query and at_key; the index behind the last term
    means the bias of the projection.
    """
    queries = _without(form.query, residual[0], at_query, pairs[:, 0])
    keys = _without(form.key, residual[1], at_key, pairs[:, 1])
    query, key = form.query.row(residual[0]).expand_as(queries), form.key.row(residual[1]).expand_as(keys)
    score = form.score
    return score(query, key) - score(queries, key) - score(query, keys) + score(queries, keys)


def removed_key_terms(
    form: HeadForm,
    at_key: Float64[Tensor, "b d_model"],
    residual: Float64[Tensor, "two d_model"],
    terms: set[int],
) -> Float64[Tensor, ""]:
    """Return the score that is lost without some terms in the key's stream y, together: S(x, y) - S(x, y - their sum).

    S is the score (`form`), x and y are the streams of query and key (`residual`); every norm is computed again. The
    result is one number in logits. `terms` are indices into at_key; the index behind the last term means the bias of
    keys.
    """
    gone = [term for term in terms if term < len(at_key)]
    key = form.key.row(residual[1] - at_key[gone].sum(0), bias=len(at_key) not in terms)
    query = form.query.row(residual[0])[None]
    return (form.score(query, form.key.row(residual[1])[None]) - form.score(query, key[None]))[0]


def _without(
    side: StreamSide, x: Float64[Tensor, "d_model"], written: Float64[Tensor, "terms d_model"], terms: Tensor
) -> Float64[Tensor, "pairs d_head"]:
    """Return the head's query or key for the stream x without one term, for each index in `terms`.

    `side` is the query or the key as a function of the stream, `written` are the terms of x; the index behind the last
    term means the bias. Every norm is computed again.
    """
    removed = torch.cat([written, torch.zeros_like(written[:1])])[terms]
    is_bias = (terms == len(written))[:, None]
    return torch.where(is_bias, side.row(x, bias=False), side.row(x - removed))
