"""Gradients through a model beside finite differences."""

import torch
import zoo


def in_float64(backend, name):
    return zoo.converted(getattr(zoo, backend)(name), torch.float64)


def loss_of(model):
    """A weighted sum of logits of a short prompt."""
    weights = torch.randn(2, 12, zoo.VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (model(zoo.prompt(length=12), return_type="logits") * weights).sum()


@torch.no_grad()
def slopes(loss, weight, gradient, step=3e-4):
    """The slope of the loss along a random direction of the weight, by finite difference and by the gradient."""
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = []
    for sign in (1, -1):
        weight += sign * step * direction
        values.append(float(loss()))
        weight -= sign * step * direction
    return (values[0] - values[1]) / (2 * step), float((gradient * direction).sum())
