"""The training loop of all studies: learning rates, loss, gradient, clipping, step."""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn


def gradient_steps(
    optimizer: torch.optim.Optimizer,
    batch_loss: Callable[[int], Float[Tensor, "*runs"]],
    *,
    steps: int,
    done: int = 0,
    rates_at: Callable[[int], Sequence[float]],
    clipped: Sequence[Sequence[nn.Parameter]] = (),
    clip: float = 1.0,
) -> Iterator[Float[Tensor, "*runs"]]:
    """Train the optimizer's parameters in place; yields the loss of each step's batch, before that step was taken.

    Nothing happens between two steps, so the caller can look at the model, and stop.

    Args:
        optimizer: with all parameters that are trained; no other parameter gets a gradient.
        batch_loss: loss of the batch of a step, counted from 0. Called once per step, in order. Losses of several runs
            that are trained side by side are added up.
        steps: gradient steps, those included that are done.
        done: steps that were taken before; the first one taken here has this number.
        rates_at: learning rate of each group of the optimizer at a step.
        clipped: sets of parameters whose gradient is clipped, each by its own norm.
        clip: largest norm of the gradient of each set.
    """
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(done, steps):
        for group, rate in zip(optimizer.param_groups, rates_at(step), strict=True):
            group["lr"] = rate
        loss = batch_loss(step)
        optimizer.zero_grad()
        loss.sum().backward(inputs=trained)
        for parameters in clipped:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        yield loss.detach()


def to_device_of(model: nn.Module, *values: Tensor) -> tuple[Tensor, ...]:
    """Return tensors on the device of the model's parameters; data are drawn on the CPU, the same for every device."""
    device = next(model.parameters()).device
    return tuple(value.to(device) for value in values)


def warm_up(step: int, warmup_steps: int) -> float:
    """Factor on a learning rate that rises linearly from 0 at step 0 to 1 at step `warmup_steps`."""
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0
