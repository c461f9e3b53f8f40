"""Gradient checkpointing computes blocks again in the backward pass, with their rotations: gradients are the same."""

import pytest
import torch
import zoo
from spectral_zoo import base, logits, moved, some_models
from torch.utils.checkpoint import checkpoint

BRIDGES = ("llama", "qwen3", "gptj", "neox")


def gradients(spectral, loss):
    spectral.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone() for name, parameter in spectral.named_parameters() if parameter.grad is not None
    }


def loss_of(spectral):
    return spectral(zoo.prompt(), return_type="loss")


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert any("spectral" in name for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", BRIDGES)
@pytest.mark.parametrize("reentrant", [True, False])
def test_switched_on_in_the_wrapped_model(name, reentrant):
    spectral = moved("bridge", name, share_weights=False).train()
    wanted, expected = gradients(spectral, loss_of(spectral)), logits(spectral)
    spectral.original_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(gradients(spectral, loss_of(spectral)), wanted)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in base("bridge", name).modules())
    assert torch.equal(logits(spectral.eval()), expected)


@some_models
@pytest.mark.parametrize("reentrant", [True, False])
def test_put_around_blocks_by_hand(backend, name, reentrant):
    spectral = moved(backend, name, share_weights=False)
    wanted = gradients(spectral, spectral(zoo.prompt(), return_type="loss", **without_cache(backend)))
    for block in spectral.blocks:
        own = block.forward
        block.__dict__["forward"] = lambda *given, own=own, **named: checkpoint(
            lambda *inputs: own(*inputs, **named), *given, use_reentrant=reentrant
        )
    assert_same(gradients(spectral, spectral(zoo.prompt(), return_type="loss", **without_cache(backend))), wanted)


def without_cache(backend):
    return {"use_cache": False} if backend == "bridge" else {}


@some_models
def test_around_the_whole_model(backend, name):
    spectral = moved(backend, name)
    wanted = gradients(spectral, loss_of(spectral))
    assert_same(gradients(spectral, checkpoint(lambda: loss_of(spectral), use_reentrant=False)), wanted)
    assert all(parameter.grad is None for parameter in spectral.base.parameters())
