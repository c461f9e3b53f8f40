"""Random score parts of the same RMS as the removed part: a control for the size of the edit."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.hooks.parts import Removal


def random_frames(seed: int, layer: int, jobs: list[tuple[int, int]], d_head: int) -> Float[Tensor, "jobs d d"]:
    """Draw a Haar-random orthogonal matrix for each (head, draw), each from a generator of its own."""
    drawn = []
    for head, draw in jobs:
        stream = np.random.SeedSequence([seed, layer, head, draw]).generate_state(1)[0]
        generator = torch.Generator().manual_seed(int(stream))
        gaussian = torch.randn(d_head, d_head, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        drawn.append(q * r.diagonal().sign())  # without the signs QR would favour some rotations
    return torch.stack(drawn)


def random_difference(
    removal: Removal, which: list[int], frames: Float[Tensor, "jobs d d"]
) -> Float[Tensor, "batch jobs pos pos"]:
    """Compute `q O k^T` of bias-free queries and keys before rotation, O orthogonal, scaled to the RMS of `removal`.

    The RMS is over the unmasked pairs of each sequence. `which` are indices among the heads of `removal`.
    """
    assert removal.query is not None
    assert removal.key is not None
    assert removal.allowed is not None
    query, key = removal.query.content[:, which], removal.key.content[:, which]
    allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, which]
    drawn = query @ frames.to(query) @ key.mT
    removed_rms, drawn_rms = (root_mean_square(scores, allowed) for scores in (removal.difference[:, which], drawn))
    return drawn * (removed_rms / drawn_rms.clamp_min(torch.finfo(drawn_rms.dtype).tiny))[..., None, None]


def root_mean_square(
    scores: Float[Tensor, "batch heads pos pos"], allowed: Bool[Tensor, "*batch pos pos"]
) -> Float[Tensor, "batch heads"]:
    """Root mean square over the allowed pairs of each sequence."""
    square = (scores * allowed).square().sum((-2, -1))
    return (square / allowed.sum((-2, -1))).sqrt()
