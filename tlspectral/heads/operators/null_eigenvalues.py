"""Eigenvalues of a head's null: its own singular values between random frames (FP section 3)."""

import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from tlspectral.algebra.nulls import block_generator, haar_blocks, one_thread
from tlspectral.models.reading.layer import AttentionLayer


def null_eigenvalues(
    layer: AttentionLayer, singular_values: Float64[Tensor, "k"], draws: int, seed: int
) -> Complex128[Tensor, "draws k"]:
    """Return the eigenvalues of the first draws of a head's null, as in a table of this seed with shared blocks."""
    n = layer.effective_dimension
    k = min(len(singular_values), n)  # under LayerNorm a head as wide as the model has one direction less
    blocks = haar_blocks(n, k, draws, block_generator(seed, n, k))
    with one_thread():
        return torch.linalg.eigvals(singular_values[:k, None] * blocks)
