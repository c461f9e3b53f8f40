"""Running a spectral model: every way gives the same, under hooks, after failures, on devices, in half precision."""

import copy
import functools

import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of
from spectral_zoo import NORMED, logits, move, moved, some_models

from tlspectral.models.attention import attention_view
from tlspectral.spectral_rope import to_spectral


@some_models
def test_every_way_to_run_it_gives_the_same(backend, name):
    spectral = moved(backend, name)
    expected = logits(spectral)
    assert not torch.equal(expected, logits(spectral.base))
    with torch.no_grad():
        assert torch.equal(spectral(zoo.prompt()), expected)
        assert torch.equal(spectral.run_with_hooks(zoo.prompt()), expected)
        found, cache = spectral.run_with_cache(zoo.prompt())
        assert torch.equal(found, expected)
        with spectral.hooks() as inside:
            assert inside is spectral
            assert torch.equal(inside(zoo.prompt()), expected)
        own = spectral.base.run_with_cache(zoo.prompt())[1]
    assert torch.equal(cache["blocks.0.attn.hook_q"], own["blocks.0.attn.hook_q"])
    assert not torch.equal(cache["blocks.0.attn.hook_pattern"], own["blocks.0.attn.hook_pattern"])
    assert spectral.cfg.n_heads == spectral.base.cfg.n_heads
    assert spectral.cfg is not spectral.base.cfg  # flags that are set there act on one model
    assert spectral.tokenizer is None
    assert attention_view(spectral).backend == backend
    assert torch.equal(spectral.W_U, spectral.base.W_U)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = spectral.no_such_name


@some_models
@pytest.mark.parametrize("when", ["context", "permanent", "run"])
def test_hooks_of_others_come_first(backend, name, when):
    """An edit of the query acts on what the base makes and is turned with it, whenever the hook was added."""
    spectral = moved(backend, name)
    query = f"blocks.0.attn.hook_{'rot_q' if name in NORMED else 'q'}"
    seen = {}

    def keep(what):
        def hook(x, hook):
            seen[what] = x.clone()

        return hook

    def double(x, hook):
        return 2 * x

    pattern = "blocks.0.attn.hook_pattern"
    spectral.base.run_with_hooks(zoo.prompt(), fwd_hooks=[(query, keep("base"))])
    hooks = [(query, double), (query, keep("query")), (pattern, keep("pattern"))]
    if when == "run":
        spectral.run_with_hooks(zoo.prompt(), fwd_hooks=hooks)
    elif when == "context":
        with spectral.hooks(fwd_hooks=hooks):
            logits(spectral)
    else:
        points = {point: spectral.hook_dict[point] for point, _ in hooks}
        for point, hook in hooks:
            points[point].add_hook(hook, is_permanent=True)
        logits(spectral)
        for point in points.values():
            point.remove_hooks(including_permanent=True)
    assert torch.equal(seen["query"], 2 * seen["base"])
    if name in ("neox", "gptj"):
        return  # a gain does not reach the columns that do not turn
    with torch.no_grad():
        spectral.spectral["0"].gain.mul_(2)
        spectral.run_with_hooks(zoo.prompt(), fwd_hooks=[(pattern, keep("gain"))])
    assert torch.equal(seen["pattern"], seen["gain"])  # doubling is exact, and commutes with the rotations


@some_models
def test_a_failed_run_leaves_nothing_behind(backend, name):
    spectral = moved(backend, name)
    about, expected = state_of(spectral.base), logits(spectral)

    def fail(x, hook):
        raise ArithmeticError("from a hook")

    for run in (spectral, spectral.run_with_cache, functools.partial(spectral.run_with_hooks, fwd_hooks=[])):
        with pytest.raises(ArithmeticError), spectral.hooks(fwd_hooks=[("blocks.1.attn.hook_k", fail)]):
            run(zoo.prompt())
        assert_unchanged(spectral.base, about)
    assert torch.equal(logits(spectral), expected)


@some_models
def test_a_run_inside_a_run_is_turned_once(backend, name):
    spectral = moved(backend, name)
    expected, found, depth = logits(spectral), [], []

    def run_again(x, hook):
        if not depth:
            depth.append(1)
            found.append(logits(spectral))

    with spectral.hooks(fwd_hooks=[("blocks.1.attn.hook_k", run_again)]):
        outer = logits(spectral)
    assert torch.equal(found[0], expected)
    assert torch.equal(outer, expected)


@some_models
def test_a_reset_of_hooks_inside_a_run_leaves_it_on(backend, name):
    spectral = moved(backend, name)
    expected = logits(spectral)
    reset = [("blocks.0.hook_resid_pre", lambda x, hook: spectral.reset_hooks())]
    with torch.no_grad():
        assert torch.equal(spectral.run_with_hooks(zoo.prompt(), fwd_hooks=reset), expected)


def test_taking_permanent_hooks_off_leaves_the_rotation_on():
    spectral = moved("bridge", "llama")
    expected = logits(spectral)

    def take_off(x, hook):
        spectral.hook_dict["blocks.1.attn.hook_q"].remove_hooks(including_permanent=True)

    with torch.no_grad():
        found = spectral.run_with_hooks(zoo.prompt(), fwd_hooks=[("blocks.0.hook_resid_pre", take_off)])
    assert torch.equal(found, expected)


@some_models
def test_to_moves_the_spectral_parameters_too(backend, name):
    model = getattr(zoo, backend)(name)
    spectral = to_spectral(model)
    assert spectral.to(torch.float64) is spectral
    assert {parameter.dtype for parameter in spectral.parameters()} == {torch.float64}
    found = logits(spectral)
    assert found.dtype == torch.float64
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(found, logits(copy.deepcopy(model).to(torch.float64)))
    move(spectral)
    assert not torch.equal(logits(spectral), found)
    assert {parameter.dtype for parameter in spectral.float().parameters()} == {torch.float32}


def test_half_precision_keeps_parity_and_float32_frequencies():
    model = zoo.bridge("llama").to(torch.bfloat16)
    spectral = to_spectral(model)
    assert {parameter.dtype for parameter in spectral.spectral_parameters()} == {torch.float32}
    assert torch.equal(logits(spectral), logits(model))


def test_training_flag_is_the_bases():
    model = zoo.bridge("llama").train()
    assert to_spectral(model).training
    assert not to_spectral(model.eval()).training
