"""Soft constraints on the query-key operator during training, from thin factors; nothing d_model x d_model is built.

The penalties of "Fingerprint, Not Blueprint" (FP, section 10). Symmetrising the static `M = W_Q W_K^T` does not touch
`Im(M_t)`: under rotary positions M holds the real parts of the `M_t` alone, so the two penalties act on different
parts. Both read the weights as they are stored: no norm gain is folded in and nothing is centred. They are
`tlspectral.heads.qk_penalty` with `folded=False` and `detach_denominator=True`, but for FP's 1e-8 in the denominators.

A penalty is any function of the model that returns a scalar; a user's own goes wherever these go.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, pair_columns, phase_squares
from tlspectral.heads.operators.penalty import antisymmetric_squares
from tlspectral_studies.common.model import AttentionOnlyTransformer, TransformerConfig

_FLOOR = 1e-8  # added to the denominators, as in FP's runs


def symmetric_penalty(model: AttentionOnlyTransformer) -> Float[Tensor, ""]:
    """Antisymmetric share of the static operator: `||M_A||^2 / ||M||^2`, mean over all heads (FP section 10).

    The denominator is detached: gradients see it as a constant, so that they shrink M_A and do not enlarge M.

    Args:
        model: whose raw `W_Q`, `W_K` are read.

    Returns:
        A scalar in [0, 1]; about 0.5 at initialisation. It is `dir_frac` squared, of the raw weights.

    What it does not establish: anything about the phase of rotary heads, which may stay as it is.
    """
    squares = [antisymmetric_squares(block.attn.W_Q, block.attn.W_K) for block in model.layers]
    return torch.stack([_share(part, whole).mean() for part, whole in squares]).mean()


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
    pairs = rotary_pairs(model.config)
    if pairs is None:
        raise ValueError(
            f"positional_embedding_type={model.config.positional_embedding_type!r}: without rotary positions there is "
            "no Im(M_t) to suppress"
        )
    shares = []
    for block in model.layers:
        real, imag = phase_squares(block.attn.W_Q, block.attn.W_K, pairs)
        shares.append(_share(imag.sum(1), (real + imag).sum(1)).mean())
    return torch.stack(shares).mean()


def rotary_pairs(config: TransformerConfig) -> RotaryGeometry | None:
    """Which columns are rotated together, all at rate 1: the squares and norms of their parts do not depend on it."""
    if config.positional_embedding_type != "rotary":
        return None
    pairs = pair_columns(config.d_head, adjacent=config.rotary_adjacent_pairs)
    return RotaryGeometry(torch.ones(config.d_head // 2, dtype=torch.float64), *pairs, config.d_head)


def _share(part: Float[Tensor, " heads"], whole: Float[Tensor, " heads"]) -> Float[Tensor, " heads"]:
    return part / (whole.detach() + _FLOOR)
