"""Checks that the view reproduces a model's own attention scores. Nothing is reported for a model where it does not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.errors import ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.attention import (
    AttentionLayer,
    AttentionView,
    QueryKeyNorm,
    RawAttention,
    attention_view,
    fold_attention,
    key_value_groups,
    require_even_scale,
)
from tlspectral.models.attention.padding import refuse_padding
from tlspectral.rotary import RotaryGeometry, per_pair, rotate, with_gain_and_phase

CHECK_LENGTH = 24


@dataclass(frozen=True)
class ScoreCheck:
    """The result of checking a model.

    Attributes:
        layers: indices checked.
        errors: worst |ours - model's| of each layer, over unmasked entries.
        tolerances: largest error allowed in each layer.
        compared: "scores", or "pattern" where a layer exposes no scores.
        outside_m: [layer, head] share of score variance, within a query's row, that comes from terms outside M.
    """

    layers: tuple[int, ...]
    errors: tuple[float, ...]
    tolerances: tuple[float, ...]
    compared: tuple[str, ...]
    outside_m: tuple[Float64[np.ndarray, "heads"], ...]

    def of_layer(self, layer: int) -> dict[str, Any]:
        """Return error, tolerance, layer and what was compared, as tables store them."""
        index = self.layers.index(layer)
        return {
            "worst_error": self.errors[index],
            "tolerance": self.tolerances[index],
            "layer": layer,
            "compared": self.compared[index],
        }


def verify_scores(model: Any, tokens: Int[Tensor, "*batch pos"] | None = None) -> pd.Series:
    """Rebuild every layer's attention scores from its folded weights and compare them with the model's own.

    The input of each layer is taken from a run of the model; norm, biases, M, rotation (the model's own cos and sin
    tables), scale and softcap are ours, in float64. Entries that the model masks are left out. Where a bridge exposes
    no scores, the softmax is compared with the model's pattern. ALiBi is compared up to a shift of each query's row,
    which the softmax does not see and in which implementations differ.

    Args:
        model: a TransformerBridge or HookedTransformer.
        tokens: prompt ids, [batch, pos]; None takes 24 ids drawn at random (seed 0), so that no tokenizer is needed.

    Returns:
        Series, index `layer`: the worst absolute error of that layer.

    Raises:
        ScoreMismatch: an error exceeds 1e-5 + 1e-5 max|score| (float32 and wider) or 4 eps max|score| (16-bit); for
            patterns 1e-5 or eps max|score|.
        UnsupportedArchitecture, BadWeights: a layer cannot be read.
        ValueError: tokens that look padded, are longer than the positions that the model has, or than the length up to
            which its score scale holds.

    What it does not establish: that TransformerLens itself reproduces the published model (`load_model` compares the
    log-probabilities).
    """
    view = attention_view(model)
    check = check_scores(view, tokens)
    return pd.Series(check.errors, index=pd.Index(check.layers, name="layer"), name="worst_error")


def check_scores(
    view: AttentionView, tokens: Int[Tensor, "*batch pos"] | None = None, layers: Sequence[int] | None = None
) -> ScoreCheck:
    """Check the scores of a view as `verify_scores` does, and return all results. Raises as `verify_scores`."""
    layers = tuple(range(view.n_layers) if layers is None else layers)
    prompt = check_prompt(view) if tokens is None else torch.as_tensor(tokens).reshape(-1, tokens.shape[-1])
    if tokens is not None:
        refuse_padding(view, prompt, "give prompts of one length, without padding")
    names = {index: view.hook_names(index) for index in layers}
    points = ("residual", "scores", "pattern", "cos", "sin")
    wanted = [name for points_of_layer in names.values() for point, name in points_of_layer.items() if point in points]
    captured = view.capture(prompt, wanted, last=names[max(layers)]["pattern"])
    results = [_check_layer(view, index, names[index], captured) for index in layers]
    errors, tolerances, compared, outside = zip(*results, strict=True)
    return ScoreCheck(layers, errors, tolerances, compared, outside)


def check_prompt(view: AttentionView) -> Int[Tensor, "1 pos"]:
    """Return 24 ids drawn at random (seed 0), fewer where the context or the valid length of a layer is shorter."""
    limits = [view.raw(index).valid_up_to for index in range(view.n_layers)]
    length = min([CHECK_LENGTH, view.n_ctx, *(limit for limit in limits if limit)])
    return torch.randint(0, view.d_vocab, (1, length), generator=torch.Generator().manual_seed(0))


def _check_layer(
    view: AttentionView, index: int, names: dict[str, str], captured: dict[str, Tensor]
) -> tuple[float, float, str, Float64[np.ndarray, "heads"]]:
    raw = view.raw(index)
    require_even_scale(raw, index, captured[names["residual"]].shape[-2])
    residual = captured[names["residual"]].cpu().double()
    pattern = captured[names["pattern"]].cpu().double()
    allowed = _allowed(pattern, index)
    tables = _tables(view, raw.rotary, index, residual.shape[-2], captured)
    inside, outside = _all_score_terms(raw, index, residual, tables)
    ours = inside + outside
    if raw.softcap is not None:
        ours = raw.softcap * torch.tanh(ours / raw.softcap)
    share = _row_variance(outside, allowed) / (_row_variance(outside, allowed) + _row_variance(inside, allowed))
    eps = torch.finfo(raw.w_q.dtype).eps
    if "scores" in names:
        compared = "scores"
        theirs = captured[names["scores"]].cpu().double()
        # Masks are -inf or the lowest number of the scores' own dtype.
        allowed = allowed & (theirs > torch.finfo(captured[names["scores"]].dtype).min / 2)
        scale = float(theirs[allowed].abs().max())
        if raw.alibi is not None:
            theirs, ours = _centred_rows(theirs, allowed), _centred_rows(ours, allowed)
        error = float((ours - theirs)[allowed].abs().max())
    else:
        compared = "pattern"
        scale = float(ours[allowed].abs().max())
        rebuilt = ours.masked_fill(~allowed, -torch.inf).softmax(-1)
        error = float((rebuilt - pattern)[allowed].abs().max())
    # Measured on 17 architectures in float32: at most 1.2e-5 at scores of 12, and 7e-7 in a pattern. A wrong scale,
    # pairing or norm is off by tenths and more. 16-bit storage rounds scores themselves; a pattern, which lies in
    # [0, 1], shows less of it (0.008 in bfloat16), and would hide a scale wrong by half if it were allowed more.
    if compared == "scores":
        tolerance = 1e-5 + 1e-5 * scale if eps < 1e-4 else 4 * eps * scale
    else:
        tolerance = 1e-5 if eps < 1e-4 else eps * scale
    if not error <= tolerance:
        raise ScoreMismatch(
            f"layer {index}: the {compared} rebuilt from the folded weights differ from the model's own by "
            f"{error:.2e} (allowed {tolerance:.2e}, largest score {scale:.1f}); this model's attention is not "
            "the bilinear form that was read from it, so no table is returned"
        )
    return error, tolerance, compared, share.numpy()


def _all_score_terms(
    raw: RawAttention,
    index: int,
    residual: Float64[Tensor, "batch pos d_model"],
    tables: tuple[Float64[Tensor, "*heads pos pairs"], Float64[Tensor, "*heads pos pairs"]] | None,
) -> tuple[Float64[Tensor, "batch heads pos pos"], Float64[Tensor, "batch heads pos pos"]]:
    """Return `score_terms` of all heads, folded one key/value group at a time: a large layer takes gigabytes.

    Under a query/key norm over all heads, all groups are folded together.
    """
    together = any(norm is not None and norm.over_heads for norm in (raw.q_norm, raw.k_norm))
    by_group = []
    for heads, group in [(slice(None), raw)] if together else key_value_groups(raw):
        group_tables = tables
        if tables is not None and group.rotary is not None and group.rotary.per_head:
            group_tables = (tables[0][heads], tables[1][heads])
        by_group.append(score_terms(fold_attention(group, index), residual, group_tables))
    inside, outside = (torch.cat(terms, dim=1) for terms in zip(*by_group, strict=True))
    return inside, outside


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

    def normed(part: Tensor, whole: Tensor, norm: QueryKeyNorm | None) -> Tensor:
        if norm is not None:
            part = norm.applied(part, norm.token_scale(whole))
        return part.transpose(1, 2)

    def queries(part: Tensor) -> Tensor:
        part = normed(part, q_full, layer.q_norm)
        if tables is None or layer.rotary is None:
            return part
        return rotate(with_gain_and_phase(part, layer.rotary), *tables, layer.rotary)

    def keys(part: Tensor) -> Tensor:
        part = normed(part, k_full, layer.k_norm)
        if tables is None or layer.rotary is None:
            return part
        cos, sin = tables
        if layer.rotary.per_head:  # alike within a group
            cos, sin = cos[::groups], sin[::groups]
        return rotate(part, cos, sin, layer.rotary)

    def product(of_queries: Tensor, of_keys: Tensor) -> Tensor:
        return layer.score_scale * of_queries @ of_keys.repeat_interleave(groups, dim=1).transpose(-1, -2)

    inside = product(queries(q), keys(k))
    total = product(queries(q_full), keys(k_full))
    outside = total - inside
    if layer.alibi is not None:
        outside = outside + layer.alibi.bias(torch.arange(residual.shape[-2]))[:, None]
    return inside, outside


def _allowed(pattern: Float64[Tensor, "batch heads pos pos"], index: int) -> Bool[Tensor, "batch heads pos pos"]:
    """Return the entries that the model attends to: causal, and not zeroed by a window."""
    above = torch.ones(pattern.shape[-2:], dtype=torch.bool).triu(1)
    if bool((pattern[..., above] > 0).any()):
        raise UnsupportedArchitecture(f"layer {index}: queries attend to later keys (encoder); only decoders are read")
    return (pattern > 0) & ~above


def _tables(
    view: AttentionView, rotary: RotaryGeometry | None, index: int, n_positions: int, captured: dict[str, Tensor]
) -> tuple[Float64[Tensor, "*heads pos pairs"], Float64[Tensor, "*heads pos pairs"]] | None:
    """Return the model's own cos and sin per pair (and spectral head), checked against the geometry's frequencies."""
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


def _centred_rows(scores: Tensor, allowed: Tensor) -> Tensor:
    unmasked = torch.where(allowed, scores, 0.0)
    return unmasked - unmasked.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)


def _row_variance(scores: Tensor, allowed: Tensor) -> Float64[Tensor, "heads"]:
    centred = torch.where(allowed, _centred_rows(scores, allowed), 0.0)
    return centred.square().sum((0, 2, 3)) / allowed.sum((0, 2, 3))
