"""Soft constraints on the query-key operator during training, from thin factors; nothing d_model x d_model is built.

The penalties of "Fingerprint, Not Blueprint" (FP, section 10). Symmetrising the static `M = W_Q W_K^T` does not touch
`Im(M_t)`: under rotary positions M holds the real parts of the `M_t` alone, so the two penalties act on different
parts. Both read the weights as they are stored: no norm gain is folded in and nothing is centred.

A penalty is any function of the model that returns a scalar; a user's own goes wherever these go.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.rotary import pair_columns
from tlspectral.studies.common.model import AttentionOnlyTransformer

_FLOOR = 1e-8  # added to the denominators, as in FP's runs


def symmetric_penalty(model: AttentionOnlyTransformer) -> Float[Tensor, ""]:
    """Antisymmetric share of the static operator: `||M_A||^2 / ||M||^2`, mean over all heads (FP section 10).

    The denominator is detached: gradients see it as a constant, so that they shrink M_A and do not enlarge M.
    `||M||^2 = <W_Q^T W_Q, W_K^T W_K>`, `||M_A||^2 = (||M||^2 - tr M^2) / 2` and `tr M^2 = tr (W_K^T W_Q)^2`.

    Args:
        model: whose raw `W_Q`, `W_K` are read.

    Returns:
        A scalar in [0, 1]; about 0.5 at initialisation. It is `dir_frac` squared, of the raw weights.

    What it does not establish: anything about the phase of rotary heads, which may stay as it is.
    """
    return torch.stack([_antisymmetric_share(block.attn.W_Q, block.attn.W_K).mean() for block in model.layers]).mean()


def phase_penalty(model: AttentionOnlyTransformer) -> Float[Tensor, ""]:
    """Phase share of rotary heads: `sum_t ||Im M_t||^2 / sum_t (||Re M_t||^2 + ||Im M_t||^2)`, mean over all heads.

    The denominator is detached, as in `symmetric_penalty`. Norms are squared here and plain in `rope_imag_frac`, so the
    share is the smaller of the two where little phase is left (FP section 10).

    Args:
        model: with rotary positions, whose raw `W_Q`, `W_K` are read.

    Returns:
        A scalar in [0, 1]; about 0.5 at initialisation.

    Raises:
        ValueError: a model without rotary positions.

    What it does not establish: anything about the symmetry of the static operator.
    """
    config = model.config
    if config.positional_embedding_type != "rotary":
        raise ValueError(
            f"positional_embedding_type={config.positional_embedding_type!r}: without rotary positions there is no "
            "Im(M_t) to suppress"
        )
    real, imag = pair_columns(config.d_head, adjacent=config.rotary_adjacent_pairs)
    shares = [
        _phase_share(
            block.attn.W_Q[..., real], block.attn.W_Q[..., imag], block.attn.W_K[..., real], block.attn.W_K[..., imag]
        )
        for block in model.layers
    ]
    return torch.stack([share.mean() for share in shares]).mean()


def _antisymmetric_share(
    w_q: Float[Tensor, "heads d_model d_head"], w_k: Float[Tensor, "heads d_model d_head"]
) -> Float[Tensor, "heads"]:
    squared = ((w_q.mT @ w_q) * (w_k.mT @ w_k)).sum((-2, -1))  # heads
    core = w_k.mT @ w_q  # heads d_head d_head
    trace = (core * core.mT).sum((-2, -1))  # heads; tr M^2
    return (squared - trace) / 2 / (squared.detach() + _FLOOR)


def _phase_share(
    a: Float[Tensor, "heads d_model pairs"],
    c: Float[Tensor, "heads d_model pairs"],
    b: Float[Tensor, "heads d_model pairs"],
    d: Float[Tensor, "heads d_model pairs"],
) -> Float[Tensor, "heads"]:
    """From `Re M_t = a b^T + c d^T` and `Im M_t = c b^T - a d^T`: a, c of W_Q and b, d of W_K, real and imaginary."""
    aa, bb, cc, dd = ((columns * columns).sum(1) for columns in (a, b, c, d))  # heads pairs
    cross = 2 * (a * c).sum(1) * (b * d).sum(1)  # heads pairs
    real, imag = aa * bb + cc * dd + cross, cc * bb + aa * dd - cross  # heads pairs
    return imag.sum(-1) / ((real + imag).sum(-1).detach() + _FLOOR)
