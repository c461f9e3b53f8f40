"""The attention of heads to given keys, with what the heads read changed."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import in_float64
from tlspectral.hooks.edges.senders import CachedRun
from tlspectral.models.attention import AttentionLayer, Latent, require_even_scale
from tlspectral.models.attention.head_scores import rotation_tables
from tlspectral.models.attention.run_scores import require_own_pattern, row_scores, visible_keys
from tlspectral.models.attention.writes import Input, LayerReads, change_of_reads, layer_reads
from tlspectral.selection import head_name


@dataclass(frozen=True)
class QueryKeyPairs:
    """The queries of each sequence that are scored, and the key that each is scored on."""

    queries: Int[Tensor, "sequences pairs"]
    keys: Int[Tensor, "sequences pairs"]


@dataclass(frozen=True)
class ReceiverLayer:
    """Queries and keys of one layer in a cached run, before a query/key norm and rotation, and what they read.

    Those from a latent are behind its norm, and `layer` is without it. `reads` is how the heads read `what` is changed,
    `allowed` the pairs of tokens that are not masked, and `tables` are cos and sin of each pair that the run applied,
    None without rotary positions.
    """

    run: CachedRun
    layer: AttentionLayer
    what: Input
    reads: list[LayerReads]
    residual: Float64[Tensor, "sequences pos d_model"]
    query: Float64[Tensor, "sequences pos heads d_head"]
    key: Float64[Tensor, "sequences pos kv_heads d_head"]
    allowed: Bool[Tensor, "*sequences pos pos"]
    tables: tuple[Tensor, Tensor] | None

    def change(
        self, removed: Float64[Tensor, "senders sequences pos d_model"], pairs: QueryKeyPairs
    ) -> Float64[Tensor, "senders sequences rows heads d_head"]:
        """Return the change of what heads read: of queries at those of the pairs, of keys at all positions."""
        x = self.residual
        if self.what == "q":
            rows = pairs.queries[..., None].expand(-1, -1, x.shape[-1]).to(x.device)
            x, removed = x.gather(1, rows), removed.gather(2, rows.expand(len(removed), -1, -1, -1))
        return change_of_reads(self.reads, x, removed)

    def attention(
        self,
        head: int,
        pairs: QueryKeyPairs,
        change: Float64[Tensor, "*copies sequences rows heads d_head"] | None = None,
    ) -> Float64[Tensor, "*copies sequences"]:
        """Return the head's attention from the queries to their keys, mean over the pairs of a sequence."""
        scores = self._scores(head, pairs.queries, change)
        keys = pairs.keys[..., None].expand(*scores.shape[:-1], 1)
        return scores.softmax(-1).gather(-1, keys)[..., 0].mean(-1)

    def _scores(
        self, head: int, rows: Int[Tensor, "sequences pairs"], change: Tensor | None = None
    ) -> Float64[Tensor, "*copies sequences pairs pos"]:
        """Return masked scores of some queries of each sequence."""
        of_query, of_key = (change, None) if self.what == "q" else (None, change)
        scores = row_scores(
            self.layer, head, self.query, self.key, self.tables, rows, query_change=of_query, key_change=of_key
        )
        allowed = _rows_of(self.allowed.expand(len(rows), -1, -1), rows)
        return scores.own()[..., 0, :, :].masked_fill(~allowed, -torch.inf)

    def require_own_pattern(self, head: int, pairs: QueryKeyPairs) -> None:
        """Refuse a head whose attention in the run is not that of its own queries and keys. Raises ScoreMismatch."""
        pattern = self.run.captured[self.run.view.hook_names(self.layer.layer)["pattern"]]
        rows = _rows_of(pattern[:, head], pairs.queries)
        require_own_pattern(self._scores(head, pairs.queries), rows, pattern.dtype, head_name(self.layer.layer, head))


def receiver_layer(run: CachedRun, index: int, what: Input) -> ReceiverLayer:
    """Return one layer of a cached run, of which one input is changed.

    Raises ValueError past the length up to which the layer's score scale holds; as `AttentionView.layer`, and
    ScoreMismatch for rotary tables that are not those of the layer's frequencies.
    """
    view, names = run.view, run.view.hook_names(index)
    layer = view.layer(index)
    n_positions = run.sequences.tokens.shape[1]
    require_even_scale(layer, index, n_positions)
    query, key = (in_float64(run.captured[names[point]]) for point in ("query", "key"))
    if isinstance(layer.k_norm, Latent):
        query, key = layer.normed("query", query), layer.normed("key", key)
        layer = replace(layer, q_norm=None, k_norm=None)
    query, key = (x.reshape(*x.shape[:2], -1, layer.d_head) for x in (query, key))
    tables = rotation_tables(view, layer.rotary, index, n_positions, run.captured)
    return ReceiverLayer(
        run,
        layer,
        what,
        layer_reads(view.raw(index), what, in_float64),
        in_float64(run.captured[names["residual"]]),
        query,
        key[:, :, :: key.shape[2] // layer.n_kv_heads],  # some models repeat keys, one per query head
        visible_keys(view, index, n_positions, run.captured)[:, 0].to(query.device),
        None if tables is None else (tables[0].to(query.device), tables[1].to(query.device)),
    )


def _rows_of(matrix: Tensor, rows: Int[Tensor, "sequences pairs"]) -> Tensor:
    return matrix.gather(1, rows[..., None].expand(-1, -1, matrix.shape[-1]))
