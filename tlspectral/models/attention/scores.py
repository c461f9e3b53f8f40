"""Attention scores rebuilt in float64 from a layer's folded weights and the residual stream that enters it."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tlspectral.errors import ScoreMismatch
from tlspectral.models.attention.layer import (
    AttentionLayer,
    fold_attention,
    key_value_groups,
    require_even_scale,
    softcapped,
)
from tlspectral.models.attention.norms import QueryKeyNorm
from tlspectral.models.attention.view import AttentionView
from tlspectral.rotary import RotaryGeometry, per_pair, rotate, with_gain_and_phase


class RebuiltScores(NamedTuple):
    """Scaled scores of every pair of tokens: as the model has them before its mask, and parts before a softcap.

    The parts are those from M (`inside`) and from biases and ALiBi (`outside`).
    """

    total: Float64[Tensor, "batch heads pos pos"]
    inside: Float64[Tensor, "batch heads pos pos"]
    outside: Float64[Tensor, "batch heads pos pos"]


def rebuilt_scores(view: AttentionView, index: int, captured: dict[str, Tensor]) -> RebuiltScores:
    """Return a layer's scores from what its hook points "residual" and, where it has them, "cos" and "sin" saw.

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
        if tables is not None and group.rotary is not None and group.rotary.per_head:
            group_tables = (tables[0][heads], tables[1][heads])
        by_group.append(score_terms(fold_attention(group, index), residual, group_tables))
    inside, outside = (torch.cat(terms, dim=1) for terms in zip(*by_group, strict=True))
    return RebuiltScores(softcapped(inside + outside, raw.softcap), inside, outside)


def pattern_tolerance(stored: torch.dtype, largest_score: float) -> float:
    """Return the largest error allowed in a pattern of rebuilt scores, by the type that weights are stored in."""
    eps = torch.finfo(stored).eps
    return 1e-5 if eps < 1e-4 else eps * largest_score


def score_terms(
    layer: AttentionLayer,
    residual: Float64[Tensor, "batch pos d_model"],
    tables: tuple[Float64[Tensor, "*heads pos pairs"], Float64[Tensor, "*heads pos pairs"]] | None,
) -> tuple[Float64[Tensor, "batch heads pos pos"], Float64[Tensor, "batch heads pos pos"]]:
    """Return scaled scores before softcap and mask, as the part from M and the part outside it (biases, ALiBi)."""
    n = layer.norm.normalized(residual)
    q = torch.einsum("bpd,hdk->bphk", n, layer.w_q)
    k = torch.einsum("bpd,hdk->bphk", n, layer.w_k)
    q_full, k_full = q + layer.b_q, k + layer.b_k
    groups = layer.n_heads // layer.n_kv_heads

    def product(of_queries: Tensor, of_keys: Tensor) -> Tensor:
        queries = rotated_queries(layer, of_queries, q_full, tables)
        keys = rotated_keys(layer, of_keys, k_full, tables)
        return layer.score_scale * queries @ keys.repeat_interleave(groups, dim=1).transpose(-1, -2)

    inside = product(q, k)
    total = product(q_full, k_full)
    outside = total - inside
    if layer.alibi is not None:
        outside = outside + layer.alibi.bias(torch.arange(residual.shape[-2]))[:, None]
    return inside, outside


def rotated_queries(
    layer: AttentionLayer,
    part: Float[Tensor, "batch pos heads d_head"],
    whole: Float[Tensor, "batch pos heads d_head"],
    tables: tuple[Tensor, Tensor] | None,
) -> Float[Tensor, "batch heads pos d_head"]:
    """Return a part of the queries after query norm and rotation; `whole` are the queries that the norm divides by."""
    queries = _normed(part, whole, layer.q_norm)
    if tables is None or layer.rotary is None:
        return queries
    return rotate(with_gain_and_phase(queries, layer.rotary), *tables, layer.rotary)


def rotated_keys(
    layer: AttentionLayer,
    part: Float[Tensor, "batch pos kv_heads d_head"],
    whole: Float[Tensor, "batch pos kv_heads d_head"],
    tables: tuple[Tensor, Tensor] | None,
) -> Float[Tensor, "batch kv_heads pos d_head"]:
    """Return a part of the keys after key norm and rotation, one per key/value head; `whole` as for queries."""
    keys = _normed(part, whole, layer.k_norm)
    if tables is None or layer.rotary is None:
        return keys
    cos, sin = tables
    if layer.rotary.per_head:  # alike within a group
        groups = layer.n_heads // layer.n_kv_heads
        cos, sin = cos[::groups], sin[::groups]
    return rotate(keys, cos, sin, layer.rotary)


def _normed(part: Tensor, whole: Tensor, norm: QueryKeyNorm | None) -> Tensor:
    if norm is not None:
        part = norm.applied(part, norm.token_scale(whole))
    return part.transpose(1, 2)


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
    drift = max(float((cos - exact[0]).abs().max()), float((sin - exact[1]).abs().max()))
    # float32 tables drift by 2e-6 over 24 positions, bf16 ones are rounded to 4e-3; another base is off by tenths.
    if drift > 1e-2:
        limit = rotary.valid_up_to
        if limit is not None and n_positions > limit:
            raise ScoreMismatch(
                f"layer {index}: the prompt has {n_positions} tokens, and the rotary frequencies of this model change "
                f"past {limit} (LongRoPE, dynamic NTK; cos and sin differ by {drift:.2e}); the operators are those of "
                f"prompts of at most {limit} tokens, so use such prompts"
            )
        raise ScoreMismatch(
            f"layer {index}: the model rotates its pairs by other angles than its frequencies say "
            f"(cos and sin differ by {drift:.2e} within {n_positions} tokens)"
        )
    return cos, sin
