"""Gradients through an ablated model are those of finite differences."""

from functools import partial

import pytest
import torch
import zoo
from gradient_checks import in_float64, loss_of, slopes

from tlspectral.hooks import ablate
from tlspectral.hooks.capture import HeadCapture
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import capture_until

# Each part with and without a norm, biases, adjacent pairs, a delegating layer and a norm behind the attention.
GRADIENTS = [
    *(("bridge", "llama", part) for part in ("symmetric", "antisymmetric", "rope_phase", "output")),
    *(("bridge", "gpt2", part) for part in ("symmetric", "antisymmetric")),
    *(("bridge", name, part) for name in ("gemma2", "neox", "gptj") for part in ("symmetric", "rope_phase")),
    *(pytest.param("hooked", "qwen2", part, marks=zoo.needs_hooked) for part in ("antisymmetric", "rope_phase")),
]


def query_weight(model, backend):
    """The parameter of layer 0 that holds W_Q, and how to see a tensor of its shape as [heads, d_model, d_head]."""
    attention = model.blocks[0].attn
    if backend == "hooked":
        return attention.W_Q, lambda tensor: tensor
    n_heads = attention_view(model).n_heads(0)
    return attention.q.original_component.weight, lambda tensor: tensor.unflatten(0, (n_heads, -1)).mT


def ablated_loss(model, heads, part):
    with ablate(model, heads, part):
        return loss_of(model)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name", "part"), GRADIENTS)
def test_gradients_are_those_of_finite_differences(backend, name, part):
    model = in_float64(backend, name)
    weight, by_head = query_weight(model, backend)
    loss = partial(ablated_loss, model, [(0, 1)], part)
    (gradient,) = torch.autograd.grad(loss(), weight)
    assert bool(gradient.isfinite().all())
    for head in (0, 1):
        own = by_head(gradient)[head]
        assert bool(own.any()) == ((head, part) != (1, "output"))
        # One number for the whole head: the slope along a random direction in its W_Q.
        found, expected = slopes(loss, by_head(weight.detach())[head], own)
        # Slopes are 4 to 300, measured off by at most 8e-4 of themselves (RMS norms and softmaxes in float32).
        # A path that is cut off, as that of a folded bias through W_Q, costs 3 to 50 per cent.
        assert found == pytest.approx(expected, rel=5e-3, abs=1e-3)


@pytest.mark.fast(2)
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
@pytest.mark.parametrize(("side", "part"), [("q_norm", "symmetric"), ("k_norm", "rope_phase")])
def test_gradients_reach_the_gain_of_a_query_key_norm(backend, side, part):
    model = in_float64(backend, "qwen3")
    norm = getattr(model.blocks[0].attn, side)
    gain = norm.w if backend == "hooked" else norm.original_component.weight
    loss = partial(ablated_loss, model, [(0, 1), (0, 2)], part)
    (gradient,) = torch.autograd.grad(loss(), gain)
    found, expected = slopes(loss, gain, gradient)
    # Measured off by at most 3e-3 of themselves (norms in float32); a gain without its gradient costs 4 to 70 per cent.
    assert found == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_part_sees_the_folded_layer_with_and_without_gradients(gradients):
    view = attention_view(zoo.shared("bridge", "gpt2"))
    capture, names = HeadCapture(view, view.layer(0), [1, 0]), view.hook_names(0)
    seen = capture_until(view, zoo.prompt(), [names["query"], names["key"]], last=names["z"])
    with torch.set_grad_enabled(gradients):
        scores = capture.scores_of(seen[names["query"]], seen[names["key"]], None)
    assert scores.layer is capture.layer
    assert scores.heads == [1, 0]
