"""`reset_hooks` inside an ablation ends it, and the block says so. Runs that reset their own hooks do not end it."""

import pytest
import torch
import zoo
from ablation_runs import a_part, logits, some_models
from model_state import assert_unchanged, state_of

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate


@some_models
def test_a_reset_of_hooks_inside_is_an_error_at_the_end(backend, name):
    model = getattr(zoo, backend)(name)
    plain = logits(model)
    before = state_of(model)
    for part in (a_part(name), "output"):
        seen = []

        def reset(part=part, seen=seen):
            with ablate(model, [(0, 1), (1, 0)], part):
                seen.append(logits(model))
                model.reset_hooks()
                seen.append(logits(model))

        with pytest.raises(EditNotHonored, match=r"taken off .* before the end of the block .*blocks\.0.* reset_hooks"):
            reset()
        assert not torch.equal(seen[0], plain)
        assert torch.equal(seen[1], plain)
        assert_unchanged(model, before)


@some_models
def test_one_hook_taken_off_is_enough(backend, name):
    model = getattr(zoo, backend)(name)
    with (
        pytest.raises(EditNotHonored, match=r"1 of the \d+ hooks .*blocks\.1\.attn\.hook_k"),
        ablate(model, [(0, 1), (1, 0)], "symmetric"),
    ):
        model.hook_dict["blocks.1.attn.hook_k"].remove_hooks()


@some_models
def test_another_exception_goes_first(backend, name):
    model = getattr(zoo, backend)(name)

    def fail():
        model.reset_hooks()
        raise ArithmeticError

    with pytest.raises(ArithmeticError), ablate(model, [(0, 1)], "symmetric"):
        fail()
    # An inner block tells; the outer one does not speak over it.
    with (
        pytest.raises(EditNotHonored) as raised,
        ablate(model, [(0, 1)], "symmetric"),
        ablate(model, [(1, 1)], "output"),
    ):
        model.reset_hooks()
    assert "1 of the 1 hooks" in str(raised.value)


@some_models
def test_runs_that_reset_their_own_hooks_do_not_end_it(backend, name):
    model = getattr(zoo, backend)(name)
    z, calls = "blocks.0.attn.hook_z", []

    def count(activation, hook):
        calls.append(1)

    plain = logits(model)
    with ablate(model, [(0, 1), (1, 0)], "symmetric"):
        expected = logits(model)
        with torch.no_grad():
            for options in ({}, {"reset_hooks_end": True, "clear_contexts": True}):
                assert torch.equal(model.run_with_hooks(zoo.prompt(), fwd_hooks=[(z, count)], **options), expected)
                assert torch.equal(model.run_with_cache(zoo.prompt(), **options)[0], expected)
            with model.hooks(fwd_hooks=[(z, count)], clear_contexts=True):
                assert torch.equal(logits(model), expected)
        assert torch.equal(logits(model), expected)
    assert len(calls) == 3
    assert torch.equal(logits(model), plain)
