"""Two threads and one model: a second ablation is refused, nothing stays behind, no pass meets another's hooks."""

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier, Event

import pytest
import torch
import zoo
from ablation_runs import ablated, intact, logits, repetitions, some_models
from model_state import assert_unchanged, state_of

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate, ablation_hooks, ablation_sweep
from tlspectral.models.hooking import exclusive, user_hooks
from tlspectral.models.hooking.exclusive import evaluating, modules_of
from tlspectral.models.reading import attention_view
from tlspectral.models.running.passes import whole_logits
from tlspectral.tasks import induction

ROUNDS = 6  # of four threads that start together


@pytest.mark.slow
@some_models
def test_threads_that_ablate_one_model_leave_no_hook(backend, name):
    """Each result is the ablated one or a refusal, and the model is as before."""
    model = getattr(zoo, backend)(name)
    heads = [[(0, head), (1, head)] for head in range(4)]
    expected = [ablated(getattr(zoo, backend)(name), each, "symmetric") for each in heads]
    plain, before = logits(model), state_of(model)
    together = Barrier(4)

    def work(each):
        together.wait()
        kept = []
        for _ in range(ROUNDS):
            try:
                kept.append(ablated(model, each, "symmetric"))
            except EditNotHonored as refused:
                assert "another thread" in str(refused)  # noqa: PT017 - some of the calls raise
        return kept

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, heads))
    assert any(results)
    for wanted, kept in zip(expected, results, strict=True):
        assert all(torch.equal(found, wanted) for found in kept)
    assert_unchanged(model, before)
    assert torch.equal(logits(model), plain)


@pytest.mark.fast(2)
@pytest.mark.tl4
@some_models
def test_while_a_block_is_open_other_threads_are_refused(backend, name):
    """A second context, a run of this package and a plain pass, which would be ablated without knowing it."""
    model = getattr(zoo, backend)(name)
    plain, before = logits(model), state_of(model)

    def enter():
        return ablated(model, [(0, 1)], "symmetric")

    with ThreadPoolExecutor(1) as pool:
        with ablate(model, [(0, 0)], "symmetric"):
            expected = logits(model)
            for act in (enter, lambda: whole_logits(attention_view(model), zoo.prompt()), lambda: logits(model)):
                with pytest.raises(EditNotHonored, match=r"another thread.*copy of the model"):
                    pool.submit(act).result()
            assert torch.equal(logits(model), expected)
            assert not torch.equal(enter(), expected)  # the same thread may nest
            with pytest.raises(EditNotHonored, match="another thread"):  # the outer block is open still
                pool.submit(enter).result()
        assert_unchanged(model, before)
        pool.submit(enter).result()
        assert torch.equal(pool.submit(logits, model).result(), plain)


@pytest.mark.slow
def test_copies_are_ablated_at_the_same_time():
    """In another thread, while the block of the first is open: its own model is what the message asks for."""
    model = zoo.bridge("llama")
    other, opened, done, heads = copy.deepcopy(model), Event(), Event(), [(0, 1), (1, 1)]

    def hold():
        with ablate(model, [(0, 1)], "symmetric"):
            opened.set()
            assert done.wait(30)
            return logits(model)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        try:
            assert opened.wait(30)
            found = ablated(other, heads, "symmetric")
        finally:
            done.set()
        assert not torch.equal(held.result(), found)
    assert torch.equal(found, ablated(model, heads, "symmetric"))


@pytest.mark.slow
@some_models
def test_a_list_of_hooks_does_not_mix_the_runs_of_two_threads(backend, name):
    """The second thread runs a shorter prompt between the first one's queries and scores."""
    model, short = getattr(zoo, backend)(name), zoo.prompt(length=9)
    hooks = ablation_hooks(model, [(0, 1)], "symmetric")
    inside = []

    def interrupt(activation, hook):
        if not inside:
            inside.append(1)
            with ThreadPoolExecutor(1) as pool:
                inside.append(pool.submit(logits, model, short).result())

    with model.hooks(fwd_hooks=hooks):
        expected = logits(model), logits(model, short)
    with model.hooks(fwd_hooks=[*hooks, ("blocks.0.attn.hook_v", interrupt)]):
        found = logits(model)
    assert torch.equal(found, expected[0])
    assert torch.equal(inside[1], expected[1])
    assert not torch.equal(found, intact(backend, name))


@some_models
def test_half_of_the_hooks_left_by_others_is_told(backend, name):
    model = getattr(zoo, backend)(name)
    with model.hooks(fwd_hooks=ablation_hooks(model, [(0, 1)], "symmetric")):
        model.hook_dict["blocks.0.attn.hook_q"].remove_hooks()
        with pytest.raises(EditNotHonored, match=r"layer 0: the hook on query did not run.*reset_hooks"):
            logits(model)


@pytest.mark.slow
@pytest.mark.tl4
def test_a_model_is_walked_through_as_often_for_many_heads_as_for_one(spied):
    model = zoo.bridge("smollm3")  # four layers
    task = induction(repetitions("smollm3", count=3))
    sweep = partial(ablation_sweep, model, "output", task=task)
    sweep(heads=["L0", "L1", "L2"])  # what is proved once per model is proved now
    walks = spied(exclusive, "modules_of")
    looks = spied(user_hooks, "modules_of")
    counts = []
    for heads in ("L1H0", "L1", ["L1H0", "L2H0"], ["L1", "L2"]):
        walks.clear()
        looks.clear()
        sweep(heads=heads)
        counts.append((len(looks), len(walks)))
    # The first of each pair counts looks for hooks of the user: two of the sweep, and one of each layer before its
    # proof is taken as known. The second is of the run without ablation, and of the pass of all layers.
    assert counts == [(3, 2), (3, 2), (4, 2), (4, 2)]


def test_within_evaluation_a_model_is_in_evaluation_mode_until_the_outer_context_ends():
    model = zoo.bridge("gpt2").train()
    before = [module.training for module in modules_of(model)]
    assert any(before)
    with evaluating(model):
        with evaluating(model):
            assert not any(module.training for module in modules_of(model))
        assert not any(module.training for module in modules_of(model))
    assert [module.training for module in modules_of(model)] == before
    model.eval()
    with evaluating(model):
        pass
    assert not any(module.training for module in model.modules())


@some_models
def test_modules_are_those_of_the_model_and_of_what_it_wraps(backend, name):
    model = zoo.shared(backend, name)
    roots = {model, getattr(model, "original_model", model)}
    found = modules_of(model)
    assert {*found} == {module for root in roots for module in root.modules()}
    assert len(found) == len({*found})
