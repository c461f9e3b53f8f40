"""Spectral models, key/value caches and positions of the caller's own."""

import pytest
import torch
import zoo
from spectral_zoo import base, greedy, logits, moved, on_both_backends, some_models

# Rotated at hook_q and at hook_rot_q, sliding windows, a partial rotation; the other backend.
CACHED = [("bridge", name) for name in ("llama", "gemma3", "neox")]
CACHED += [pytest.param("bridge", name, marks=pytest.mark.slow) for name in ("qwen3", "mistral")]
CACHED += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("qwen3", "neox")]


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


@some_models
def test_left_padding_changes_nothing(backend, name):
    spectral = moved(backend, name)
    tokens = zoo.prompt(length=12)
    padded = torch.cat([torch.zeros(2, 5, dtype=torch.long), tokens], dim=1)
    mask = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.ones_like(tokens)], dim=1)
    found = logits(spectral, padded, attention_mask=mask)[:, 5:]
    # Rounding 1e-6; the effect of the spectral parameters themselves is above 0.1.
    torch.testing.assert_close(found, logits(spectral, tokens), rtol=0, atol=2e-5)
    assert float((logits(spectral, tokens) - logits(base(backend, name), tokens)).abs().max()) > 0.05
