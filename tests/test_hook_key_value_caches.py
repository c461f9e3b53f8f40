"""Generation inside an ablation runs without its key/value cache; a cache that the model is given is refused."""

import pytest
import torch
import zoo
from ablation_runs import a_part
from spectral_zoo import greedy
from zoo import shared

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate

GENERATING = [("bridge", "gemma2"), ("bridge", "gptj"), ("bridge", "gptneo")]
GENERATING += [pytest.param("hooked", "llama", marks=zoo.needs_hooked)]

OPTIONS = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), GENERATING)
@pytest.mark.parametrize("length", [1, 24])
def test_generation_with_its_defaults_is_greedy_decoding_of_the_ablated_model(backend, name, length):
    model, prompt = shared(backend, name), zoo.prompt(batch=1, length=length)
    for part in ("symmetric", a_part(name)):
        with ablate(model, [(0, 1)], part):
            expected = greedy(model, prompt, 4)
            assert torch.equal(model.generate(prompt, **OPTIONS), expected)
            assert torch.equal(model.generate(prompt, use_past_kv_cache=True, **OPTIONS), expected)
    assert not {"generate", "generate_stream"} & set(vars(model))


def test_nested_blocks_and_streams_generate_without_a_cache():
    model, prompt = shared("bridge", "llama"), zoo.prompt(batch=1)
    with ablate(model, [(0, 1)], "symmetric"):
        one = model.generate(prompt, **OPTIONS)
        with ablate(model, [(1, 2)], "rope_phase"):
            assert torch.equal(model.generate(prompt, **OPTIONS), greedy(model, prompt, 4))
        assert torch.equal(model.generate(prompt, **OPTIONS), one)
        stream = model.generate_stream(prompt, max_new_tokens=4, do_sample=False, verbose=False, stop_at_eos=False)
        assert torch.equal(list(stream)[-1][:, -1:], one[:, -1:])
    assert "generate" not in vars(model)


@zoo.needs_hooked
def test_a_forward_with_past_keys_is_refused():
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    model = shared("hooked", "llama")
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
    with torch.no_grad():
        model(
            zoo.prompt(batch=1), past_kv_cache=cache, attention_mask=torch.ones(1, zoo.PROMPT_LENGTH, dtype=torch.long)
        )
        for extra in (1, 5, zoo.PROMPT_LENGTH):
            with pytest.raises(EditNotHonored, match="key/value cache"), ablate(model, [(1, 1)], "symmetric"):
                model(
                    zoo.prompt(batch=1, length=extra),
                    past_kv_cache=cache,
                    attention_mask=torch.ones(1, extra, dtype=torch.long),
                )
