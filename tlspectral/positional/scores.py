"""Positional and symbolic scores from mean attention weights of blocks (PS, appendix B.3).

PS is "Decoupling Positional and Symbolic Attention Behavior". d_b is the mean attention weight of the tokens of block
b. A swap of blocks i and j has `v = (d_i, d_j)` before it and `v' = (d'_i, d'_j)` after it, in the same two slots:

    s_pos = sum alpha cos(v', v)            the weights stay where they were
    s_sym = sum alpha cos(v', (d_j, d_i))   the weights follow the blocks

alpha is the softmax of |d_i - d_j| / tau over the swaps. With f and f' the angles of v and v', every swap satisfies
`cos(v', v)^2 + cos(v', swapped v)^2 = 1 + sin 2f sin 2f'`. A head with peaked weights therefore lies on the unit
circle.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

RELATIVE_TAU = 0.1
NULL_DRAWS = 200


class SwapScores(NamedTuple):
    """Scores of each row (a head, or a rotary pair of a head), and the weights of the swaps in them.

    Attributes:
        s_pos, s_sym: positional and symbolic score, 0 to 1; the formulas are in the module's docstring.
        tau: the temperature that was used, in units of attention weight.
        alpha_ess: effective number of swaps, 1 / sum alpha^2.
        alpha: weight of each swap [swaps, rows]; the weights of a row sum to 1.
    """

    s_pos: Float64[Tensor, "*rows"]
    s_sym: Float64[Tensor, "*rows"]
    tau: Float64[Tensor, "*rows"]
    alpha_ess: Float64[Tensor, "*rows"]
    alpha: Float64[Tensor, "swaps *rows"]


def block_means(weights: Float64[Tensor, "*rows pos"], spans: list[tuple[int, int]]) -> Float64[Tensor, "*rows blocks"]:
    """Return the mean attention weight of each block's tokens.

    `weights`: of one query on all keys. `spans`: start and stop position of each block.
    """
    return torch.stack([weights[..., start:stop].mean(-1) for start, stop in spans], dim=-1)


def swap_scores(
    before: Float64[Tensor, "swaps *rows 2"], after: Float64[Tensor, "swaps *rows 2"], tau: float | None = None
) -> SwapScores:
    """Return the positional and the symbolic score of each row (a head, or a rotary pair of a head).

    s_pos is the sum over swaps of alpha cos(v', v); s_sym is the sum of alpha cos(v', v with its two entries
    exchanged). alpha is the softmax of |d_i - d_j| / tau over swaps ("Decoupling Positional and Symbolic Attention
    Behavior", appendix B.3).

    Args:
        before: v = (d_i, d_j) of each swap: mean attention weights of both blocks before the swap; NaN for a block that
            the query cannot see.
        after: v', the mean weights in the same two slots after the swap.
        tau: temperature of alpha, in attention weight. Default: 0.1 of the row's largest |d_i - d_j|, so that scores do
            not depend on the size of the weights. The paper gives no value.

    Returns:
        `SwapScores` with `s_pos`, `s_sym` (0 to 1), `tau`, `alpha_ess` (effective number of swaps) and `alpha`. A swap
            has weight 0 if v or v' is zero or contains NaN. A row without usable swaps is NaN. If every |d_i - d_j| is
            0, alpha is uniform and the default tau is 0.

    Not established: how the model solves the task, or that its output depends on the attention.
    """
    usable = (before.amax(-1) > 0) & (after.amax(-1) > 0)
    difference = (before[..., 0] - before[..., 1]).abs()
    if tau is None:
        largest = difference.where(usable, -torch.inf).amax(0)
        used = torch.where(largest >= 0, RELATIVE_TAU * largest, torch.nan)
    else:
        used = torch.full_like(difference[0], tau)
    exponent = torch.where(used > 0, difference / used.where(used > 0, 1.0), 0.0)
    alpha = exponent.where(usable, -torch.inf).softmax(0)
    positional = alpha * _cosine(after, before, usable)
    symbolic = alpha * _cosine(after, before.flip(-1), usable)
    return SwapScores(positional.sum(0), symbolic.sum(0), used, 1 / alpha.square().sum(0), alpha)


def score_correlation(
    before: Float64[Tensor, "swaps heads 2"],
    scores: SwapScores,
    *,
    draws: int = NULL_DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """Correlate s_pos and s_sym over heads, and compare with a random null that has only the geometry of the scores.

    In the null each head keeps its own weights v and alpha. In each swap, v either follows the blocks or stays. The
    probability to follow is drawn once per head, uniformly from 0 to 1. Heads of the null differ only in this
    probability and in v and alpha.

    Args:
        before: v of each swap: mean attention weights of both blocks before the swap.
        scores: from `swap_scores`, one row per head; heads without a score are left out.
        draws: number of draws of the null. Default: 200.
        seed: seed of these draws. Default: 0.

    Returns:
        Dict: `pearson` (correlation over heads), `null_mean` and `null_sd` (of the null's correlations), `null_share`
            (share of null draws with a correlation at or below `pearson`), `draws` and `n_heads`. The first four are
            None for fewer than three heads with scores, or if a score is equal for all heads.

    Not established: the exclusion principle. A negative correlation, even below the null, is not evidence for it,
    because geometry makes `s_pos^2 + s_sym^2` at least 1 at every swap.
    """
    scored = ~torch.isnan(scores.s_pos)
    alpha, v = scores.alpha[:, scored], before[:, scored]
    pearson = next(iter(_pearson(scores.s_pos[None, scored], scores.s_sym[None, scored]).tolist()), None)
    moved = alpha * _cosine(v, v.flip(-1), v.amax(-1) > 0)
    generator = torch.Generator().manual_seed(seed)
    drawn = alpha.new_empty(2, 0 if pearson is None else draws, alpha.shape[1])
    for of_draw in drawn.unbind(1):
        probability = torch.rand(v.shape[1], generator=generator, dtype=torch.float64)
        follows = torch.rand(v.shape[:2], generator=generator, dtype=torch.float64) < probability
        of_draw[0] = torch.where(follows, moved, alpha).sum(0)
        of_draw[1] = torch.where(follows, alpha, moved).sum(0)
    null = _pearson(*drawn)
    return {
        "pearson": pearson,
        "null_mean": float(null.mean()) if len(null) > 1 else None,
        "null_sd": float(null.std()) if len(null) > 1 else None,
        "null_share": float((null <= pearson).double().mean()) if pearson is not None and len(null) else None,
        "draws": draws,
        "n_heads": int(scored.sum()),
    }


def _cosine(
    left: Float64[Tensor, "*swaps 2"], right: Float64[Tensor, "*swaps 2"], usable: Bool[Tensor, "*swaps"]
) -> Float64[Tensor, "*swaps"]:
    """Return the cosine between each pair of weights in `left` and in `right`; 0 where `usable` is False."""
    # Scaled first, because squares of small weights underflow.
    left, right = (x / x.amax(-1, keepdim=True).where(usable[..., None], 1.0) for x in (left, right))
    product = (left * right).sum(-1) / (left.norm(dim=-1) * right.norm(dim=-1))
    return product.where(usable, 0.0)


def _pearson(x: Float64[Tensor, "draws heads"], y: Float64[Tensor, "draws heads"]) -> Float64[Tensor, "kept"]:
    """Return Pearson's correlation of `x` and `y` (-1 to 1) over heads for each draw that has one; draws with equal
    scores, or fewer than three heads, are dropped.
    """
    if x.shape[-1] < 3:
        return x.new_empty(0)
    # Scores lie in [0, 1]; equal ones differ by rounding, 1e-16 or so.
    differ = torch.minimum(x.amax(-1) - x.amin(-1), y.amax(-1) - y.amin(-1)) >= 1e-12
    x, y = (scores[differ] - scores[differ].mean(-1, keepdim=True) for scores in (x, y))
    return ((x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))).clamp(-1, 1)
