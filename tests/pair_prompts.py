"""Random prompts, each with a pair that differs from it in one token."""

import torch


def prompt_pairs(n, length, *, seed, at=4):
    """Token ids of n prompts and of their pairs, [n, length] each, which differ at position `at`."""
    clean = torch.randint(5, 90, (n, length), generator=torch.Generator().manual_seed(seed))
    other = clean.clone()
    other[:, at] = (other[:, at] - 4) % 85 + 5
    return clean, other
