"""After an ablation the model, its hooks and its weights are as before, also when a run broke off.

`reset_hooks` inside an ablation ends it, and the block says so. Runs that reset their own hooks do not end it.
"""

import copy
from typing import Any

import joblib
import pytest
import torch
import zoo
from ablation_runs import a_part, interrupt, logits, some_models
from model_state import assert_unchanged, state_of
from zoo import shared

from tlspectral.errors import BadHead, EditNotHonored
from tlspectral.hooks import ablate, ablation_hooks


@pytest.mark.tl4
@pytest.mark.slow
@some_models
def test_the_model_and_its_hooks_are_as_before(backend, name):
    model = getattr(zoo, backend)(name)
    plain = logits(model)  # a bridge puts hooks of its own on norms at its first forward
    calls = []
    model.add_perma_hook("blocks.0.attn.hook_pattern", lambda x, hook: calls.append("permanent"))
    model.add_hook("blocks.1.attn.hook_z", lambda x, hook: calls.append("added"))
    before = state_of(model)
    for part in ("symmetric", "output"):
        with ablate(model, [(0, 1), (1, 0)], part) as yielded:
            assert yielded is model
            assert not torch.equal(logits(model), plain)
        assert_unchanged(model, before)
    with pytest.raises(KeyboardInterrupt), ablate(model, [(0, 1)], "symmetric"):
        raise KeyboardInterrupt
    assert_unchanged(model, before)
    # In the middle of a forward pass, between the capture of queries and the edit.
    late = model.hooks(fwd_hooks=[("blocks.1.attn.hook_v", interrupt)])
    with pytest.raises(KeyboardInterrupt), ablate(model, [(0, 1), (1, 1)], "symmetric"), late:
        model(zoo.prompt())
    assert_unchanged(model, before)
    calls.clear()
    assert torch.equal(logits(model), plain)
    assert calls == ["permanent", "added"]


@some_models
def test_a_run_that_broke_off_does_not_disturb_the_next(backend, name):
    model = shared(backend, name)
    hooks = ablation_hooks(model, [(0, 1)], "symmetric")
    with model.hooks(fwd_hooks=hooks):
        expected = logits(model)
        with pytest.raises(KeyboardInterrupt):
            model.run_with_hooks(zoo.prompt(length=9), fwd_hooks=[("blocks.0.attn.hook_v", interrupt)])
        assert torch.equal(logits(model), expected)
        assert logits(model, zoo.prompt(length=9)).shape[1] == 9


# --- hooks that are taken off inside ---


@pytest.mark.tl4
@pytest.mark.slow
@some_models
def test_a_reset_of_hooks_inside_is_an_error_at_the_end(backend, name):
    model = getattr(zoo, backend)(name)
    plain = logits(model)
    before = state_of(model)
    heads = [(0, 1), (1, 0)]
    for part in (a_part(name), "output"):
        seen = []

        def reset(part=part, seen=seen):
            with ablate(model, heads, part):
                seen.append(logits(model))
                model.reset_hooks()
                seen.append(logits(model))

        with pytest.raises(
            EditNotHonored, match=r"taken off .* before the end of the `with` block .*blocks\.0.* reset_hooks"
        ):
            reset()
        assert not torch.equal(seen[0], plain)
        assert torch.equal(seen[1], plain)
        assert_unchanged(model, before)
    # One hook taken off is enough.
    with (
        pytest.raises(EditNotHonored, match=r"1 of the \d+ hooks .*blocks\.1\.attn\.hook_k"),
        ablate(model, heads, "symmetric"),
    ):
        model.hook_dict["blocks.1.attn.hook_k"].remove_hooks()
    # Another exception goes first; and where an inner block tells, the outer one does not speak over it.

    def fail():
        model.reset_hooks()
        raise ArithmeticError

    with pytest.raises(ArithmeticError), ablate(model, heads, "symmetric"):
        fail()
    with (
        pytest.raises(EditNotHonored, match="1 of the 1 hooks"),
        ablate(model, heads, "symmetric"),
        ablate(model, [(1, 1)], "output"),
    ):
        model.reset_hooks()


@pytest.mark.tl4
@pytest.mark.slow
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


@pytest.mark.fast(1)
@pytest.mark.tl4
@some_models
@pytest.mark.parametrize("part", ["output", "symmetric"])
def test_a_copy_made_inside_a_block_says_so(backend, name, part):
    model = getattr(zoo, backend)(name)
    plain = logits(model)
    with ablate(model, [(0, 1)], part):
        packed: Any = joblib.wrap_non_picklable_objects(model, keep_wrapper=False)
        make, arguments = packed.__reduce__()
        copies = copy.deepcopy(model), make(*arguments)
        for copied in copies:
            with pytest.raises(EditNotHonored, match=r"copied inside an `ablate` context.*copy the model before"):
                logits(copied)
    for copied in copies:
        with pytest.raises(EditNotHonored, match="copied inside an `ablate` context"):
            logits(copied)
    assert torch.equal(logits(model), plain)
    assert torch.equal(logits(copy.deepcopy(model)), plain)


def test_a_block_that_is_never_entered_warns():
    model = shared("bridge", "llama")
    with pytest.warns(UserWarning, match=r"never entered, so nothing is removed: write `with tls\.ablate") as caught:
        ablate(model, [(0, 1)], "output")
    assert caught[0].filename == __file__

    @ablate(model, [(0, 1)], "output")
    def ablated_logits():
        return logits(model)

    assert not torch.equal(ablated_logits(), logits(model))
    assert torch.equal(ablated_logits(), ablated_logits())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("heads", "part", "into", "error"),
    [
        ("L99H0", "output", None, BadHead),
        ("L0H1", "no such part", None, ValueError),
        ("L0H1", "output", "L9H0.q", BadHead),
        ("L1H1", "output", "L0H0.q", ValueError),
    ],
)
def test_what_does_not_exist_is_refused_at_the_call(heads, part, into, error):
    with pytest.raises(error):
        ablate(shared("bridge", "llama"), heads, part, into=into)
