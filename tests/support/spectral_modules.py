"""SpectralRoPE alone, without a model."""

import torch

from tlspectral.algebra.rotary import pair_columns
from tlspectral.spectral_rope import SpectralRoPE

SHAPE = (8, 8, 4, 2)


def module(shape=SHAPE, *, adjacent=False, dtype=torch.float64, theta=None, **options):
    _, rotary_dim, heads, kv_heads = shape
    pairs = rotary_dim // 2
    theta = 10.0 ** -torch.linspace(0, 3, pairs, dtype=torch.float64) if theta is None else theta
    real, imag = pair_columns(rotary_dim, adjacent=adjacent)
    return SpectralRoPE(theta.to(dtype), heads, kv_heads, real_index=real, imag_index=imag, **options)
