"""Train gates on heads so that few open gates keep a task's value, and cut the gates to sets of heads."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from tlspectral.hooks.sufficient.gated_runs import GatedRuns

STEPS = 25
"""Steps of Adam for one fit. Every step is a forward and a backward pass of all prompts."""

_RATE = 0.4  # learning rate, in units of the logit of a gate
_OPEN = 2.0  # mean logit of a gate at the start: .88 of the head's own write


def trained_gates(
    runs: GatedRuns, penalty: float, seeds: Sequence[Sequence[int]]
) -> Float64[np.ndarray, "starts heads"]:
    """Train one gate per head from several random starts; return the gates, numbers between 0 and 1.

    The loss is |1 - kept| + penalty * (sum of the gates). `kept` is (value - value of no head) / (value of all heads -
    value of no head), each a mean over prompts. A gate is the sigmoid of a number that Adam changes (Kingma and Ba
    2015). `seeds` has the seed of each start: these numbers are drawn with mean 2 and standard deviation 1.
    """
    logits = torch.stack([_start(len(runs.heads), seed) for seed in seeds]).requires_grad_()
    adam = torch.optim.Adam([logits], lr=_RATE)
    none = float(runs.none.values.mean())
    gap = float(runs.every.values.mean()) - none
    for _ in range(STEPS):
        gates = torch.sigmoid(logits.detach())
        values, slopes = runs.slopes(gates.float().to(runs.view.device))
        kept = (values.mean(1) - none) / gap
        of_gates = -torch.sign(1.0 - kept)[:, None] * slopes / gap + penalty
        logits.grad = of_gates * gates * (1.0 - gates)
        adam.step()
    return torch.sigmoid(logits.detach()).numpy()


def _start(n: int, seed: Sequence[int]) -> Float64[Tensor, "heads"]:
    """Return the logits of n gates at the start of a fit, drawn with `seed`."""
    return torch.from_numpy(_OPEN + np.random.default_rng([*seed]).standard_normal(n))


def largest(numbers: Float64[np.ndarray, "*fits heads"], n: int) -> Bool[np.ndarray, "*fits heads"]:
    """Return a mask along the last axis, True for the n largest numbers; among equal numbers the first is taken."""
    order: Int[np.ndarray, "*fits heads"] = np.argsort(-numbers, axis=-1, kind="stable")[..., :n]
    mask = np.zeros(numbers.shape, dtype=bool)
    np.put_along_axis(mask, order, True, axis=-1)
    return mask
