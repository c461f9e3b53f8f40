"""Gradient checkpointing computes blocks again when the rotations are gone: it is refused where it would act."""

import pytest
import torch
import zoo
from spectral_zoo import everything_about, logits, moved, some_models
from torch.utils.checkpoint import checkpoint

from tlspectral.errors import EditNotHonored
from tlspectral.spectral_rope import to_spectral

# Of torch, where blocks are checkpointed without gradients.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
BRIDGES = ("llama", "qwen3", "gptj", "neox")


def loss_of(spectral):
    return spectral(zoo.prompt(), return_type="loss")


def gradients(spectral, loss):
    spectral.zero_grad()
    spectral.base.zero_grad()
    loss.backward()
    return {
        name: parameter.grad.clone() for name, parameter in spectral.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("name", BRIDGES)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_switched_on_in_the_wrapped_model_it_is_refused_in_training(name, reentrant, when):
    model = zoo.bridge(name).train()
    spectral = to_spectral(model) if when == "after" else None
    model.original_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    spectral = spectral or to_spectral(model)
    expected, about = logits(spectral), everything_about(model)
    for run in (spectral, spectral.run_with_hooks, spectral.run_with_cache):
        with pytest.raises(EditNotHonored, match=r"gradient checkpointing is on.*gradient_checkpointing_disable"):
            run(zoo.prompt())
    assert everything_about(model) == about
    # Where it does not act nothing is refused: without gradients (above) and in evaluation mode.
    model.eval()
    assert torch.equal(spectral(zoo.prompt(), return_type="logits"), expected)
    found = gradients(spectral, loss_of(spectral))
    model.train()
    model.original_model.gradient_checkpointing_disable()
    wanted = gradients(spectral, loss_of(spectral))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[parameter], wanted[parameter]) for parameter in wanted)


@some_models
def test_put_around_blocks_by_hand_it_is_refused_or_fails(backend, name):
    """With use_reentrant=True in our words, in the forward pass; else in torch's, in the backward pass."""
    spectral = moved(backend, name)
    block = spectral.base.blocks[0]
    own = block.forward
    for reentrant in (True, False):
        block.__dict__["forward"] = lambda *given, reentrant=reentrant, **named: checkpoint(
            lambda *inputs: own(*inputs, **named), *given, use_reentrant=reentrant
        )
        try:
            if reentrant:
                with pytest.raises(EditNotHonored, match=r"blocks\.0\.attn.*use_reentrant=True"):
                    loss_of(spectral)
            else:
                with pytest.raises(RuntimeError):  # CheckpointError, or a bridge's key/value cache that grows
                    gradients(spectral, loss_of(spectral))
            with torch.no_grad():
                loss_of(spectral)
        finally:
            del block.__dict__["forward"]


@some_models
def test_around_the_whole_model_it_is_right(backend, name):
    """There the rotations are put on again with everything else."""
    spectral = moved(backend, name)
    wanted = gradients(spectral, loss_of(spectral))
    found = gradients(spectral, checkpoint(lambda: loss_of(spectral), use_reentrant=False))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[parameter], wanted[parameter]) for parameter in wanted)
    spectral.zero_grad()
    spectral.base.zero_grad()
