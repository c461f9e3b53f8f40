"""Running a spectral model: every way gives the same, under hooks and after failures."""

import functools

import pytest
import torch
import zoo
from model_state import assert_unchanged, state_of
from spectral_zoo import NORMED, base, logits, moved, some_models
from torch.utils.checkpoint import checkpoint

from tlspectral.models.attention import attention_view


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
@pytest.mark.parametrize("permanent", [True, False])
def test_hooks_of_others_come_first(backend, name, permanent):
    """An edit of the query acts on what the base makes and is turned with it, whenever the hook was added."""
    spectral, seen = moved(backend, name), {}
    query, pattern = f"blocks.0.attn.hook_{'rot_q' if name in NORMED else 'q'}", "blocks.0.attn.hook_pattern"

    def keep(what):
        return lambda x, hook: seen.update({what: x.clone()})

    def double(x, hook):
        return 2 * x

    spectral.base.run_with_hooks(zoo.prompt(), fwd_hooks=[(query, keep("base"))])
    hooks = [(query, double), (query, keep("query")), (pattern, keep("pattern"))]
    if permanent:
        for name_of_point, hook in hooks:
            spectral.hook_dict[name_of_point].add_hook(hook, is_permanent=True)
        logits(spectral)
        for point in (query, pattern):
            spectral.hook_dict[point].remove_hooks(including_permanent=True)
    else:
        spectral.run_with_hooks(zoo.prompt(), fwd_hooks=hooks)
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
def test_runs_and_resets_of_hooks_inside_a_run_leave_the_rotation_on(backend, name):
    spectral = moved(backend, name)
    expected, found = logits(spectral), []

    def run_again(x, hook):
        if not found:
            found.append(None)
            found[0] = logits(spectral)

    def reset(x, hook):
        spectral.reset_hooks()

    def take_off(x, hook):
        spectral.hook_dict["blocks.1.attn.hook_q"].remove_hooks(including_permanent=True)

    for point, act in (("attn.hook_k", run_again), ("hook_resid_pre", reset), ("hook_resid_pre", take_off)):
        with torch.no_grad():
            assert torch.equal(spectral.run_with_hooks(zoo.prompt(), fwd_hooks=[(f"blocks.0.{point}", act)]), expected)
    assert torch.equal(found[0], expected)


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
