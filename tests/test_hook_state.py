"""After an ablation the model, its hooks and its weights are as before, also when a run broke off."""

import pytest
import torch
import zoo
from ablation_runs import logits, some_models
from model_state import assert_unchanged, state_of
from zoo import shared

from tlspectral.hooks import ablate, ablation_hooks


@some_models
@pytest.mark.parametrize("part", ["symmetric", "output"])
def test_the_model_and_its_hooks_are_as_before(backend, name, part):
    model = getattr(zoo, backend)(name)
    plain = logits(model)  # a bridge puts hooks of its own on norms at its first forward
    calls = []
    model.add_perma_hook("blocks.0.attn.hook_pattern", lambda x, hook: calls.append("permanent"))
    model.add_hook("blocks.1.attn.hook_z", lambda x, hook: calls.append("added"))
    before = state_of(model)
    with ablate(model, [(0, 1), (1, 0)], part) as yielded:
        assert yielded is model
        assert not torch.equal(logits(model), plain)
    assert_unchanged(model, before)
    calls.clear()
    assert torch.equal(logits(model), plain)
    assert calls == ["permanent", "added"]


@some_models
def test_nothing_is_left_after_an_exception(backend, name):
    model = getattr(zoo, backend)(name)
    plain = logits(model)
    before = state_of(model)
    with pytest.raises(KeyboardInterrupt), ablate(model, [(0, 1)], "symmetric"):
        raise KeyboardInterrupt
    assert_unchanged(model, before)

    def interrupt(activation, hook):
        raise KeyboardInterrupt

    # In the middle of a forward pass, between the capture of queries and the edit.
    with pytest.raises(KeyboardInterrupt), ablate(model, [(0, 1), (1, 1)], "symmetric"):
        model.run_with_hooks(zoo.prompt(), fwd_hooks=[("blocks.1.attn.hook_v", interrupt)])
    assert_unchanged(model, before)
    assert torch.equal(logits(model), plain)


@some_models
def test_a_run_that_broke_off_does_not_disturb_the_next(backend, name):
    model = shared(backend, name)
    hooks = ablation_hooks(model, [(0, 1)], "symmetric")
    with model.hooks(fwd_hooks=hooks):
        expected = logits(model)

        def interrupt(activation, hook):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            model.run_with_hooks(zoo.prompt(length=9), fwd_hooks=[("blocks.0.attn.hook_v", interrupt)])
        assert torch.equal(logits(model), expected)
        assert logits(model, zoo.prompt(length=9)).shape[1] == 9
