"""Key/value caches are refused under an ablation; generation without one is as defined."""

import pytest
import torch
import zoo
from ablation_runs import a_part, logits
from zoo import shared

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate

GENERATING = [("bridge", "llama"), ("bridge", "gemma2"), ("bridge", "gptj"), ("bridge", "gptneo"), ("bridge", "opt")]
GENERATING += [pytest.param("hooked", name, marks=zoo.needs_hooked) for name in ("gpt2", "llama")]


@pytest.mark.parametrize(("backend", "name"), GENERATING)
@pytest.mark.parametrize("length", [1, 2, 24])
def test_a_cache_is_refused(backend, name, length):
    model = shared(backend, name)
    options = {"max_new_tokens": 4, "do_sample": False, "verbose": False, "stop_at_eos": False}
    prompt = zoo.prompt(batch=1, length=length)
    for part in ("symmetric", a_part(name)):
        with (
            pytest.raises(EditNotHonored, match=r"layer 0: .*key/value cache.*use_past_kv_cache=False"),
            ablate(model, [(0, 1)], part),
        ):
            model.generate(prompt, use_past_kv_cache=True, **options)
    with ablate(model, [(0, 1)], "symmetric"):
        generated = model.generate(prompt, use_past_kv_cache=False, **options)
        greedy = prompt
        for _ in range(4):
            greedy = torch.cat([greedy, logits(model, greedy)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, greedy)


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
