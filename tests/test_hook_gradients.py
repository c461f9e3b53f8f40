"""Gradients through an ablated model are those of finite differences."""

import pytest
import torch
import zoo
from ablation_runs import a_part, skip_without_rope, some_models

from tlspectral.hooks import ablate
from tlspectral.models.attention import attention_view

GRADIENTS = [("bridge", "llama"), ("bridge", "gpt2"), ("bridge", "gemma2"), ("bridge", "neox"), ("bridge", "gptj")]
GRADIENTS += [pytest.param("hooked", "qwen2", marks=zoo.needs_hooked)]


def query_weight(model, backend):
    """The parameter of layer 0 that holds W_Q, and how to see a tensor of its shape as [heads, d_model, d_head]."""
    attention = model.blocks[0].attn
    if backend == "hooked":
        return attention.W_Q, lambda tensor: tensor
    n_heads = attention_view(model).n_heads(0)
    return attention.q.original_component.weight, lambda tensor: tensor.unflatten(0, (n_heads, -1)).mT


def loss_of(model, weights):
    return (model(zoo.prompt(length=12), return_type="logits") * weights).sum()


@pytest.mark.parametrize(("backend", "name"), GRADIENTS)
@pytest.mark.parametrize("part", ["symmetric", "antisymmetric", "rope_phase", "output"])
def test_gradients_are_those_of_finite_differences(backend, name, part):
    skip_without_rope(name, part)
    model = getattr(zoo, backend)(name).to(torch.float64)
    if backend == "bridge":
        model.original_model.to(torch.float64)
    weight, by_head = query_weight(model, backend)
    weights = torch.randn(2, 12, zoo.VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with ablate(model, [(0, 1)], part):
        (gradient,) = torch.autograd.grad(loss_of(model, weights), weight)
    assert bool(gradient.isfinite().all())
    gradient = by_head(gradient)
    for head in (0, 1):
        assert bool(gradient[head].any()) == ((head, part) != (1, "output"))
        # One number for the whole head: the slope along a random direction in its W_Q.
        direction = torch.randn(gradient[head].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        step, values = 3e-4, []
        for sign in (1, -1):
            with torch.no_grad():
                by_head(weight)[head] += sign * step * direction
            with ablate(model, [(0, 1)], part), torch.no_grad():
                values.append(float(loss_of(model, weights)))
            with torch.no_grad():
                by_head(weight)[head] -= sign * step * direction
        slope, expected = (values[0] - values[1]) / (2 * step), float((gradient[head] * direction).sum())
        # Slopes are 4 to 300, measured off by at most 8e-4 of themselves (RMS norms and softmaxes in float32).
        # A path that is cut off, as that of a folded bias through W_Q, costs 3 to 50 per cent.
        assert slope == pytest.approx(expected, rel=5e-3, abs=1e-3)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize("side", ["q_norm", "k_norm"])
@pytest.mark.parametrize("part", ["symmetric", "rope_phase"])
def test_gradients_reach_the_gain_of_a_query_key_norm(backend, side, part):
    model = getattr(zoo, backend)("qwen3").to(torch.float64)
    if backend == "bridge":
        model.original_model.to(torch.float64)
    norm = getattr(model.blocks[0].attn, side)
    gain = norm.w if backend == "hooked" else norm.original_component.weight
    weights = torch.randn(2, 12, zoo.VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with ablate(model, [(0, 1), (0, 2)], part):
        (gradient,) = torch.autograd.grad(loss_of(model, weights), gain)
    direction = torch.randn(gain.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    step, values = 3e-4, []
    for sign in (1, -1):
        with torch.no_grad():
            gain += sign * step * direction
        with ablate(model, [(0, 1), (0, 2)], part), torch.no_grad():
            values.append(float(loss_of(model, weights)))
        with torch.no_grad():
            gain -= sign * step * direction
    # Measured off by at most 3e-3 of themselves (norms in float32); a gain without its gradient costs 4 to 70 per cent.
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(float((gradient * direction).sum()), rel=1e-2)


@some_models
def test_backward_reaches_every_head(backend, name):
    model = getattr(zoo, backend)(name)
    weight, by_head = query_weight(model, backend)
    with ablate(model, [(0, 1), (1, 0)], a_part(name)):
        model(zoo.prompt(), return_type="logits").square().mean().backward()
    assert bool(weight.grad.isfinite().all())
    assert by_head(weight.grad).abs().amax((1, 2)).gt(0).all()
