"""Spectral models and key/value caches: the same logits, or a refusal."""

import pytest
import torch
import zoo
from spectral_zoo import logits, moved

from tlspectral.errors import EditNotHonored

CACHED = [("bridge", name) for name in ("llama", "qwen3", "gemma3", "neox", "mistral")]
CACHED += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("qwen2", "qwen3", "neox")]


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


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_generation_is_without_a_cache(backend):
    spectral = moved(backend, "llama")
    tokens = zoo.prompt(batch=1, length=6)
    for how in (spectral.generate, lambda *a, **k: list(spectral.generate_stream(*a, **k))):
        with pytest.raises(EditNotHonored, match="use_past_kv_cache=False"):
            how(tokens, max_new_tokens=3)
    with pytest.raises(EditNotHonored, match="hf_generate"):
        spectral.hf_generate(tokens)
    found = spectral.generate(
        tokens, max_new_tokens=4, do_sample=False, stop_at_eos=False, use_past_kv_cache=False, verbose=False
    )
    expected = tokens
    for _ in range(4):
        expected = torch.cat([expected, logits(spectral, expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)
    streamed, plain = [], logits(spectral.base, tokens)
    for piece in spectral.generate_stream(
        tokens, max_new_tokens=4, max_tokens_per_yield=1, do_sample=False, stop_at_eos=False, use_past_kv_cache=False,
        verbose=False, return_type="tokens",
    ):  # fmt: skip
        assert torch.equal(logits(spectral.base, tokens), plain)  # between two pieces the base is as it was
        streamed.append(piece)
    assert torch.equal(torch.cat(streamed, dim=1), expected)
    base_alone = spectral.base.generate(
        tokens, max_new_tokens=4, do_sample=False, stop_at_eos=False, use_past_kv_cache=False, verbose=False
    )
    assert not torch.equal(base_alone, expected)


def test_positions_of_the_callers_own_are_refused():
    spectral = moved("bridge", "llama")
    with pytest.raises(EditNotHonored, match="position_ids"):
        spectral(zoo.prompt(), position_ids=torch.arange(24)[None])
    with pytest.raises(EditNotHonored, match="tuple"):
        spectral(zoo.prompt(), past_key_values=((),))
