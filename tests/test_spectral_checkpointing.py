"""Gradient checkpointing computes blocks again in the backward pass, with their rotations: gradients are the same."""

import pytest
import torch
import zoo
from spectral_zoo import base, logits, moved, some_models
from torch.utils.checkpoint import checkpoint

on_or_off = pytest.mark.parametrize("reentrant", [True, False])


def gradients(spectral, run):
    """Gradients by name after `run` has made the loss."""
    spectral.zero_grad()
    run().backward()
    return {name: value.grad.clone() for name, value in spectral.named_parameters() if value.grad is not None}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert any("spectral" in name for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["llama", pytest.param("gptj", marks=pytest.mark.slow)])
@on_or_off
def test_switched_on_in_the_wrapped_model(name, reentrant):
    spectral = moved("bridge", name, share_weights=False).train()

    def loss():
        return spectral(zoo.prompt(), return_type="loss")

    wanted, expected = gradients(spectral, loss), logits(spectral)
    spectral.original_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(gradients(spectral, loss), wanted)
    assert not any(getattr(module, "gradient_checkpointing", False) for module in base("bridge", name).modules())
    assert torch.equal(logits(spectral.eval()), expected)


@some_models
@on_or_off
def test_put_around_the_blocks_or_the_whole_model(backend, name, reentrant):
    spectral, options = moved(backend, name, share_weights=False), {"return_type": "loss"}
    if backend == "bridge":
        options["use_cache"] = False

    def loss():
        return spectral(zoo.prompt(), **options)

    wanted = gradients(spectral, loss)
    if not reentrant:
        assert_same(gradients(spectral, lambda: checkpoint(loss, use_reentrant=False)), wanted)
    for block in spectral.blocks:
        own = block.forward
        block.__dict__["forward"] = lambda *given, own=own, **named: checkpoint(
            lambda *inputs: own(*inputs, **named), *given, use_reentrant=reentrant
        )
    assert_same(gradients(spectral, loss), wanted)
