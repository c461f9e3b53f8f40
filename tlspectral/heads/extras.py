"""Columns that are computed only when asked for."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models.attention import AttentionView
from tlspectral.operators.verification import checked_prompts

POSITION_DIRECTIONS = 64


def score_asymmetries(view: AttentionView, tokens: Any) -> list[Float64[np.ndarray, "heads"]]:
    """Return, per layer and head, `mean ||S - S^T|| / mean ||S||` over prompts, `S = n M n^T` (FP section 4).

    Scores are those of content: all pairs of positions, without mask, rotation, biases and query/key-norm scalars.
    With `tokens=None` the prompt is the random one of the self-check; FP uses text.
    """
    prompts = checked_prompts(view, tokens)
    names = [view.hook_names(index)["residual"] for index in range(view.n_layers)]
    last = view.hook_names(view.n_layers - 1)["pattern"]
    residuals = view.capture(prompts.tokens, names, last=last)
    asymmetries = []
    for index, name in enumerate(names):
        layer = view.layer(index)
        n = layer.norm.normalized(residuals[name].cpu().double()) * prompts.real[..., None]  # 0 where filled up
        w_q, w_k = layer.operator_factors()
        scores = torch.einsum("bpd,hdk->bhpk", n, w_q) @ torch.einsum("bpd,hdk->bhpk", n, w_k).mT
        size = torch.linalg.matrix_norm(scores).mean(0)
        asymmetries.append((torch.linalg.matrix_norm(scores - scores.mT).mean(0) / size).numpy())
    return asymmetries


def position_directions(view: AttentionView) -> Float64[Tensor, "d_model directions"] | None:
    """Return the leading right singular vectors of the learned position embedding, at most 64.

    None without learned positions. Under LayerNorm the embedding's rows are centred first, because the norm removes
    their mean.
    """
    positions = view.position_embedding()
    if positions is None:
        return None
    rows = positions.detach().cpu().double()
    if view.raw(0).norm.kind == "LN":
        rows = rows - rows.mean(1, keepdim=True)
    return torch.linalg.svd(rows, full_matrices=False).Vh[:POSITION_DIRECTIONS].T


def position_shares(
    w_q: Float64[Tensor, "heads d_model d_head"],
    w_k: Float64[Tensor, "heads d_model d_head"],
    directions: Float64[Tensor, "d_model directions"] | None,
) -> Float64[np.ndarray, "heads"]:
    """Return `||P^T M P|| / ||M||`, P the position directions: FP's `pos_frac_M`. NaN without learned positions."""
    if directions is None:
        return np.full(len(w_q), np.nan)
    inner = torch.linalg.matrix_norm((directions.T @ w_q) @ (directions.T @ w_k).mT)
    whole = ((w_q.mT @ w_q) * (w_k.mT @ w_k)).sum((1, 2)).sqrt()
    return (inner / whole).numpy()
