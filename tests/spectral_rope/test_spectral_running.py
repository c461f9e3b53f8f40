"""Running a spectral model: every way gives the same, with caches, under hooks, in threads and after failures."""

import functools
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import zoo
from ablation_runs import left_padded
from model_state import assert_unchanged, state_of
from spectral_families import gradients
from spectral_zoo import NORMED, base, greedy, logits, moved, on_both_backends, some_models
from torch.utils.checkpoint import checkpoint

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate
from tlspectral.models.reading import attention_view


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- gradient checkpointing of one's own; what transformers switches on is asked in test_spectral_families.py ---


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@some_models
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_around_the_blocks_or_the_whole_model(backend, name, reentrant):
    spectral, options = moved(backend, name, share_weights=False), {"return_type": "loss"}
    if backend == "bridge":
        options["use_cache"] = False

    def loss():
        return spectral(zoo.prompt(), **options)

    wanted = gradients(spectral, loss)
    assert any("spectral" in name for name in wanted)
    if not reentrant:
        assert_same(gradients(spectral, lambda: checkpoint(loss, use_reentrant=False)), wanted)
    for block in spectral.blocks:
        own = block.forward
        block.__dict__["forward"] = lambda *given, own=own, **named: checkpoint(
            lambda *inputs: own(*inputs, **named), *given, use_reentrant=reentrant
        )
    assert_same(gradients(spectral, loss), wanted)


# --- key/value caches and positions of the caller's own ---

# Rotated at hook_q and at hook_rot_q, sliding windows, a partial rotation; the other backend.
CACHED = [("bridge", name) for name in ("llama", "gemma3", "neox")]
CACHED += zoo.also_slow(("bridge", "qwen3"), ("bridge", "mistral"))
CACHED += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("qwen3", "neox")]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), CACHED)
def test_a_cache_handed_over_gives_the_same_logits(backend, name):
    spectral = moved(backend, name)
    tokens = zoo.prompt(length=20)
    first, rest = tokens[:, :13], tokens[:, 13:]
    ways = (spectral, spectral.run_with_hooks, lambda *given, **named: spectral.run_with_cache(*given, **named)[0])
    for run in ways:
        with torch.no_grad():
            if backend == "hooked":
                from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

                cache = TransformerLensKeyValueCache.init_cache(spectral.cfg, first.device, len(first))
                spectral(first, past_kv_cache=cache, attention_mask=torch.ones_like(first))
                found = run(rest, past_kv_cache=cache, attention_mask=torch.ones_like(rest))
            else:
                from transformers import DynamicCache

                cache = DynamicCache(config=spectral.original_model.config)
                spectral(first, past_key_values=cache, use_cache=True)
                found = run(rest, past_key_values=cache, use_cache=True)
        # Rounding 1e-6; positions that start again at 0 move some logit by tenths.
        torch.testing.assert_close(found, logits(spectral, tokens)[:, 13:], rtol=0, atol=5e-5)


@pytest.mark.fast(2)
@on_both_backends
@pytest.mark.parametrize("cached", [True, False])
def test_generation_is_that_of_whole_passes(backend, name, cached):
    spectral = moved(backend, name)
    tokens = zoo.prompt(batch=1, length=6)
    options = {"max_new_tokens": 4, "do_sample": False, "stop_at_eos": False, "use_past_kv_cache": cached}
    expected = greedy(spectral, tokens, 4)
    assert torch.equal(spectral.generate(tokens, **options, verbose=False), expected)
    if backend == "bridge":
        wrapped = spectral.original_model  # which hf_generate runs
        found = wrapped.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=cached, eos_token_id=None)
        assert torch.equal(found, expected)
        stream = spectral.generate_stream(tokens, max_tokens_per_yield=1, return_type="tokens", **options)
        assert torch.equal(torch.cat(list(stream), dim=1), expected)
    assert not torch.equal(spectral.base.generate(tokens, **options, verbose=False), expected)


def test_positions_of_the_callers_own_are_those_that_turn():
    spectral, tokens = moved("bridge", "llama"), zoo.prompt()
    later = torch.arange(24)[None] + 100
    # Rounding of angles of 100 radians: 1e-5. Positions that are not passed on would leave no difference at all below.
    torch.testing.assert_close(logits(spectral, tokens, position_ids=later), logits(spectral), rtol=0, atol=2e-4)
    spread = logits(spectral, tokens, position_ids=3 * torch.arange(24)[None])
    unturned = logits(moved("bridge", "llama", log_omega=False, frequencies=[0]), tokens)
    assert float((spread - logits(spectral)).abs().max()) > 0.1
    assert float((spread - unturned).abs().max()) > 0.1


@pytest.mark.slow
@some_models
def test_left_padding_changes_nothing(backend, name):
    spectral, (tokens, padded, mask) = moved(backend, name), left_padded(length=12)
    found = logits(spectral, padded, attention_mask=mask)[:, 5:]
    # Rounding 1e-6; the effect of the spectral parameters themselves is above 0.1.
    torch.testing.assert_close(found, logits(spectral, tokens), rtol=0, atol=2e-5)
    assert float((logits(spectral, tokens) - logits(base(backend, name), tokens)).abs().max()) > 0.05


# --- threads ---

PROMPTS = [zoo.prompt(length=length, seed=length) for length in (24, 17, 9, 5)]
ROUNDS = 6  # of four threads that start together, each with a prompt of its own length


@pytest.mark.slow
@on_both_backends
def test_threads_of_spectral_models_of_one_base_get_their_own_logits(backend, name):
    spectral, other = moved(backend, name), moved(backend, name, scope="layer")
    jobs = [(spectral, prompt) for prompt in PROMPTS] + [(other, PROMPTS[0])]
    expected, about = [logits(*job) for job in jobs], state_of(spectral.base)
    together = Barrier(len(jobs))

    def run(job):
        together.wait()
        return [logits(*job) for _ in range(ROUNDS)]

    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(run, jobs))
    for wanted, found in zip(expected, results, strict=True):
        assert all(torch.equal(one, wanted) for one in found)
    assert_unchanged(spectral.base, about)


@some_models
def test_the_base_in_another_thread_is_not_turned(backend, name):
    """While the spectral model is inside its first block, where its rotations are on the hook points of the base."""
    spectral = moved(backend, name)
    own, expected, found = logits(spectral.base), logits(spectral), []

    def run_base(activation, hook):
        if not found:
            found.append(None)
            with ThreadPoolExecutor(1) as pool:
                found[0] = pool.submit(logits, spectral.base).result()

    with spectral.hooks(fwd_hooks=[("blocks.0.hook_resid_pre", run_base)]):
        assert torch.equal(logits(spectral), expected)
    assert torch.equal(found[0], own)


def test_an_open_ablation_refuses_passes_of_other_threads():
    """An ablation of the base is none of the spectral model."""
    spectral = moved("bridge", "llama")
    expected = logits(spectral)
    with ThreadPoolExecutor(1) as pool:
        for model in (spectral, spectral.base):
            intact = logits(model)
            with ablate(model, [(0, 1)], "symmetric"):
                ablated = logits(model)
                with pytest.raises(EditNotHonored, match="another thread"):
                    pool.submit(logits, model).result()
                if model is not spectral:
                    assert torch.equal(pool.submit(logits, spectral).result(), expected)
            assert not torch.equal(ablated, intact)
        assert torch.equal(pool.submit(logits, spectral).result(), expected)
