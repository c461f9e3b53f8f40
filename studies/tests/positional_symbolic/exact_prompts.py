"""Prompts of the canonical tasks and random heads, for the tests of heads with weights set by hand."""

import numpy as np
import torch
from tlspectral_studies.positional_symbolic.exact_heads import ExactHead


def sampled(task, n=3000, seed=0):
    """Prompts [n, length + 1] with the query last, where the answer is, and the batch."""
    batch = task.sample(n, torch.Generator().manual_seed(seed))
    return torch.cat([batch.context, batch.query[:, None]], dim=1), batch.answer_position, batch


def random_head(seed, n_tokens, *, theta, equal_keys=False):
    """A head of two rotary pairs, theta and twice theta."""
    generator = np.random.default_rng(seed)
    query, key = (torch.from_numpy(generator.standard_normal((n_tokens, 4))).view(torch.complex128) for _ in range(2))
    if equal_keys:
        key = key[:1].expand(n_tokens, -1)
    return ExactHead(query, key, torch.tensor([theta, 2 * theta], dtype=torch.float64))
