"""Eigenvalues of a head's random null: its singular values between random directions."""

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from tlspectral.algebra.nulls import block_generator, haar_blocks, one_thread
from tlspectral.models.reading.layer import AttentionLayer


def null_eigenvalues(
    layer: AttentionLayer, singular_values: Float64[Tensor, "k"], draws: int, seed: int
) -> Complex128[Tensor, "draws k"]:
    """Return the eigenvalues [draws, k] of `draws` random matrices that have the head's `singular_values` and random
    directions (its null).

    `layer` gives the dimension of the space. The draws are the first ones of a head table with the same `seed` and
    `null_blocks="shared"`.
    """
    n = layer.effective_dimension
    k = min(len(singular_values), n)  # under LayerNorm the stream has one direction less than d_model
    blocks = haar_blocks(n, k, draws, block_generator(seed, n, k))
    with one_thread():
        return torch.linalg.eigvals(singular_values[:k, None] * blocks)
