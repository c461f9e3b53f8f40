"""Where a cached step is wrong nothing uses a cache; inside an ablation none is used, and one that is given is refused.

transformers 5.24 hands attention the cache by a name that no bridge knows. `cache_name_hooks` rename it; where they do
not help, models run without a cache.
"""

import copy
import warnings

import pytest
import torch
import transformers
import zoo
from ablation_runs import a_part
from families import save
from positional_measurements import agreement_of_shared_prefill
from spectral_zoo import greedy
from transformers import DynamicCache
from zoo import shared

from tlspectral.errors import EditNotHonored
from tlspectral.hooks import ablate
from tlspectral.models.hooking.user_hooks import user_hooks
from tlspectral.models.loading import load_model
from tlspectral.models.loading.checks import avoid_lost_cache
from tlspectral.models.reading import attention_view
from tlspectral.models.running import key_value_cache
from tlspectral.models.running.cache_name import cache_name_hooks
from tlspectral.models.running.key_value_cache import (
    HeldLayers,
    WithoutCache,
    beyond_rounding,
    cached_step_difference,
    generation_difference,
    prefill,
)
from tlspectral.models.running.partial_runs import last_logits
from tlspectral.spectral_rope import to_spectral

GENERATING = [("bridge", "gemma2"), ("bridge", "gptj"), ("bridge", "gptneo")]
GENERATING += [pytest.param("hooked", "llama", marks=zoo.needs_hooked)]

CACHE_NAMES = ("past_key_values", "layer_past", "cache")
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


# --- bridges that lose the cache ---


@pytest.fixture
def lost(monkeypatch):
    """Attention is given the key/value cache by a name that nothing knows."""
    for name in ("llama", "gpt2"):
        kind = type(shared("bridge", name).blocks[0].attn)

        def forward(self, *given, own=kind.forward, **named):
            caches = {other: named.pop(other, None) for other in CACHE_NAMES}
            return own(self, *given, **named, kept=next(filter(None, caches.values()), None))

        monkeypatch.setattr(kind, "forward", forward)


@pytest.fixture
def renamed(monkeypatch):
    """Attention is called with `cache=`, as from transformers 5.24 on."""
    for name in ("llama", "gpt2"):
        kind = type(shared("bridge", name).blocks[0].attn)

        def call(self, *given, own=kind._call_impl, **named):
            caches = {other: named.pop(other, None) for other in CACHE_NAMES}
            return own(self, *given, **named, cache=next(filter(None, caches.values()), None))

        monkeypatch.setattr(kind, "_call_impl", call)


@pytest.mark.usefixtures("renamed")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_renamed_cache_is_filled(name):
    theirs, prompt = zoo.bridge(name), zoo.prompt(batch=1)
    assert generation_difference(attention_view(theirs)) > 0.1  # measured 1.3 and .4: this is what the hooks are for
    hooks = sum(len(module._forward_pre_hooks) for module in theirs.modules())
    # Positional scores fill the cache of a model of the user, and leave the model as it is.
    assert cached_step_difference(attention_view(theirs)) < 1e-5  # rounding: 9e-7 at most
    assert sum(len(module._forward_pre_hooks) for module in theirs.modules()) == hooks
    model = load_model(zoo.hf_model(name), tokenizer=zoo._tokenizer())  # a warning would be an error
    assert generation_difference(attention_view(model)) < 1e-5
    lengths = []
    with model.hooks([("blocks.0.hook_resid_pre", lambda stream, hook: lengths.append(stream.shape[1]))]):
        found = model.generate(prompt, **OPTIONS)
    assert lengths[:2] == [prompt.shape[1], 1]  # one pass over the prompt, then one token at a time
    assert torch.equal(found, greedy(model, prompt, 4))
    if not hasattr(cache_name_hooks, "__wrapped__"):  # functions that jaxtyping checks count as the user's
        assert not user_hooks(model).keys() & {f"blocks.{layer}.attn" for layer in range(model.cfg.n_layers)}
    assert torch.equal(copy.deepcopy(model).generate(prompt, **OPTIONS), found)
    with ablate(model, [(0, 1)], "output"):
        assert torch.equal(model.generate(prompt, **OPTIONS), greedy(model, prompt, 4))


@pytest.mark.parametrize("name", ["opt", "gptj", "mistral"])
def test_the_hooks_change_no_model_whose_cache_is_filled(name):
    model, prompt = zoo.bridge(name), zoo.prompt(batch=1)
    before = model.generate(prompt, **OPTIONS)
    handles = [register(hook) for register, hook in cache_name_hooks(attention_view(model))]
    assert len(handles) in (model.cfg.n_layers, 2 * model.cfg.n_layers)
    assert torch.equal(model.generate(prompt, **OPTIONS), greedy(model, prompt, 4))
    if name == "opt":  # transformers computes its attention, and the module gets the cache under its own name
        assert torch.equal(before, greedy(model, prompt, 4))


def loaded(name):
    """What `load_model` makes of a model of transformers, and the warnings of it."""
    with pytest.warns(UserWarning, match="key/value cache") as caught:
        return load_model(zoo.hf_model(name), tokenizer=zoo._tokenizer()), [str(one.message) for one in caught]


def generated(model, prompt):
    """Four tokens by each way to generate."""
    stream = model.generate_stream(prompt, max_new_tokens=4, do_sample=False, verbose=False, stop_at_eos=False)
    return [
        model.generate(prompt, **OPTIONS),
        model.generate(prompt, use_past_kv_cache=True, **OPTIONS),
        model.generate(prompt, 4, False, **{key: OPTIONS[key] for key in ("do_sample", "verbose")}),
        torch.cat([prompt, torch.cat(list(stream), dim=1)[:, -4:]], dim=1),
        model.hf_generate(prompt, max_new_tokens=4, do_sample=False, stop_at_eos=False),
    ]


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.usefixtures("lost")
def test_what_load_model_made_generates_greedily_and_one_warning_says_why_without_a_cache(name):
    model, said = loaded(name)
    assert len(said) == 1
    assert "loses the key/value cache" in said[0]
    assert "TransformerLens" in said[0]
    prompt = zoo.prompt(batch=1)
    expected = greedy(model, prompt, 4)
    for found in generated(model, prompt):
        assert torch.equal(found, expected)
    with ablate(model, [(0, 1)], "output"):
        assert torch.equal(model.generate(prompt, **OPTIONS), greedy(model, prompt, 4))
    assert torch.equal(model.generate(prompt, **OPTIONS), expected)

    other = copy.deepcopy(model)  # generates by its own weights
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.neg_()
    assert not torch.equal(greedy(other, prompt, 4), expected)
    assert torch.equal(other.generate(prompt, **OPTIONS), greedy(other, prompt, 4))


@pytest.mark.usefixtures("lost")
def test_a_hybrid_whose_cache_holds_states_too_generates_greedily(tmp_path):
    save("lfm2", {}, tmp_path)
    with pytest.warns(UserWarning, match="loses the key/value cache"):
        model = load_model(tmp_path)
    prompt = zoo.prompt(batch=1)
    assert torch.equal(model.generate(prompt, **OPTIONS), greedy(model, prompt, 4))


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.usefixtures("lost")
def test_spectral_models_generate_greedily_and_the_model_they_are_made_of_is_left_alone():
    prompt, theirs = zoo.prompt(batch=1), zoo.bridge("llama")
    with pytest.warns(UserWarning, match="loses the key/value cache") as caught:
        spectral = to_spectral(theirs)
    assert len(caught) == 1
    assert "generate" not in vars(theirs)
    assert torch.equal(spectral.generate(prompt, **OPTIONS), greedy(theirs, prompt, 4))
    model, _ = loaded("llama")
    spectral = to_spectral(model)  # and no second warning
    assert torch.equal(spectral.generate(prompt, **OPTIONS), greedy(model, prompt, 4))
    to_spectral(zoo.hf_model("llama"))  # a model of transformers, whose own attention fills the cache


def test_a_spectral_model_of_transformers_that_loses_the_cache_generates_without_one(monkeypatch):
    monkeypatch.setattr(DynamicCache, "update", lambda self, keys, values, *given, **named: (keys, values))
    prompt, theirs = zoo.prompt(batch=1), zoo.hf_model("llama")
    with pytest.warns(UserWarning, match="loses the key/value cache"):
        spectral = to_spectral(theirs)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(prompt, use_cache=False, **options)
    assert not torch.equal(theirs.generate(prompt, **options), expected)
    assert torch.equal(spectral.generate(prompt, **options), expected)


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.usefixtures("lost")
def test_positional_scores_of_several_queries_of_any_model_are_those_of_each(name):
    model = zoo.bridge(name)  # not made by load_model
    difference = cached_step_difference(attention_view(model))
    assert difference > 0.1  # measured 1.1 and 0.36
    assert prefill(attention_view(model), zoo.prompt()) is None
    # Passes without a cache: what is left is rounding between batches, 1e-5. A prefix that is lost moves scores by .1.
    assert agreement_of_shared_prefill(model, "prompt", name == "llama") < 1e-3
    assert "generate" not in vars(model)


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_a_cached_step_that_is_right_is_used(backend):
    model = load_model(zoo.hf_model("qwen2")) if backend == "bridge" else shared(backend, "qwen2")
    # Rounding: 9e-7 at most over tiny models. Without the tokens in front of it the step is off by 0.1 to 1.7.
    difference = cached_step_difference(attention_view(model))
    assert difference < 1e-5
    assert generation_difference(attention_view(model)) < 1e-5
    assert prefill(attention_view(model), zoo.prompt()) is not None
    assert not beyond_rounding(model, difference)
    assert beyond_rounding(model, float("nan"))


def test_a_bridge_that_loses_the_cache_in_some_versions_generates_greedily():
    """TransformerLens 3.9 never fills the cache of MPT."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = load_model(zoo.hf_model("mpt"), tokenizer=zoo._tokenizer())
    warned = ["loses the key/value cache" in str(one.message) for one in said]
    assert any(warned) == isinstance(model.generate, WithoutCache)
    assert torch.equal(model.generate(zoo.prompt(batch=1), **OPTIONS), greedy(model, zoo.prompt(batch=1), 4))


@zoo.needs_hooked
def test_a_hookedtransformer_with_learned_positions_generates_as_without_a_cache(folder):
    """TransformerLens 3.9 counts the positions of cached tokens twice in `generate`, if no mask comes with them."""
    view = attention_view(shared("hooked", "gpt2"))
    assert generation_difference(view) > 0.1  # measured 0.5
    assert cached_step_difference(view) < 1e-5  # its cache is right
    with pytest.warns(UserWarning, match="loses the key/value cache of this model, or its positions"):
        model = load_model(folder("gpt2"), backend="hooked")
    lengths, prompt = [], zoo.prompt(batch=1)
    with model.hooks([("blocks.0.hook_resid_pre", lambda stream, hook: lengths.append(stream.shape[1]))]):
        model.generate(prompt, max_new_tokens=2, do_sample=False, stop_at_eos=False, verbose=False)
    assert lengths == [prompt.shape[1], prompt.shape[1] + 1]  # each pass reads all tokens


def test_a_model_that_takes_no_cache_is_run_without_one_and_nothing_is_said(monkeypatch):
    kind = type(shared("bridge", "llama"))
    own = kind.forward

    def refuse(self, *given, **named):
        if any(named.get(other) is not None for other in CACHE_NAMES):
            raise TypeError("no cache is taken here")
        return own(self, *given, **named)

    monkeypatch.setattr(kind, "forward", refuse)
    model = load_model(zoo.hf_model("llama"))
    assert prefill(attention_view(model), zoo.prompt()) is None
    assert "generate" not in vars(model)
    assert agreement_of_shared_prefill(model, "key", False) < 1e-3


def test_the_probe_of_the_cache_is_not_seen_by_the_users_hooks():
    model, seen = zoo.bridge("llama"), []
    model.add_hook("blocks.0.attn.hook_q", lambda q, hook: seen.append(q.shape))
    assert cached_step_difference(attention_view(model)) < 1e-5
    assert seen == []


# --- models that make much of rounding ---


def deep(dtype):
    """A llama of many layers whose scores are so large that rounding of one layer is an effect behind the last."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 24, "num_attention_heads": 4}
        sizes = {"num_key_value_heads": 2, "vocab_size": zoo.VOCABULARY, "tie_word_embeddings": False}
        config = transformers.LlamaConfig(**shape, **sizes, attn_implementation="eager")
        model = transformers.LlamaForCausalLM(config).eval()
        for name, weight in model.named_parameters():
            weight *= 40 if "q_proj" in name or "k_proj" in name else 1
    wrapped = zoo.wrapped(model.to(dtype))
    avoid_lost_cache(wrapped)
    return wrapped


def summed_in_halves(x, weight, bias=None, own=torch.nn.functional.linear):
    """A linear map that sums one row of tokens in another order than several, as kernels of an accelerator do."""
    if x.shape[-2] > 1:
        return own(x, weight, bias)
    half = x.shape[-1] // 2
    found = own(x[..., :half], weight[:, :half]) + own(x[..., half:], weight[:, half:])
    return found if bias is None else found + bias


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_no_lost_cache_and_a_lost_cache_is_found_beside_it(monkeypatch, dtype):
    monkeypatch.setattr(torch.nn.functional, "linear", summed_in_halves)
    view = attention_view(deep(dtype))
    tokens = zoo.prompt(batch=1)
    found = key_value_cache._prefill(view, tokens[:, :-1]).last_logits(tokens[:, -1:])
    expected = last_logits(view, tokens)
    # What makes a bound on logits useless: 0.02 to 0.05 of the largest in 16 bits.
    assert float((found - expected).abs().max() / expected.abs().max()) > (0 if dtype == torch.float32 else 0.01)
    for difference in (cached_step_difference(view), generation_difference(view)):
        assert difference > 0
        assert not beyond_rounding(view.model, difference)  # measured: 0.02 in bfloat16, 0.004, 9e-7

    update = DynamicCache.update
    lose = lambda self, *given, **named: (update(self, *given, **named), given[:2])[1]  # noqa: E731
    monkeypatch.setattr(DynamicCache, "update", lose)
    other = attention_view(copy.deepcopy(view.model))
    for difference in (cached_step_difference(other), generation_difference(other)):
        assert difference > 0.5  # measured 1.0 to 1.3
        assert beyond_rounding(other.model, difference)


@zoo.needs_hooked
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_positions_that_are_lost_are_found_in_16_bits(dtype):
    model = zoo.converted(zoo.hooked("gpt2"), dtype)
    assert beyond_rounding(model, generation_difference(attention_view(model)))  # measured 0.3; the bound is 0.07
    assert not beyond_rounding(model, cached_step_difference(attention_view(model)))


def test_layers_that_hand_on_a_list_are_compared():
    """Those of OpenAI GPT do; it takes no cache, so none is lost."""
    config = transformers.OpenAIGPTConfig(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=4)
    model = load_model(transformers.OpenAIGPTLMHeadModel(config))
    assert cached_step_difference(attention_view(model)) is None
    held = HeldLayers([block.module for block in attention_view(model).blocks])
    tokens = torch.arange(5, 15)[None]
    with torch.no_grad():
        with held.noted():
            expected = model(tokens, return_type="logits")
        held.end = tokens.shape[1]
        with held.compared():
            assert torch.equal(model(tokens, return_type="logits"), expected)
    assert held.difference == 0


def test_a_cached_step_is_measured_again_where_a_forward_was_replaced(monkeypatch):
    model = zoo.bridge("llama")
    view = attention_view(model)
    assert cached_step_difference(view) < 1e-5  # rounding: 3e-7
    block = model.blocks[1].original_component
    forward = block.forward

    def by_length(x, *given, **named):
        return forward(x, *given, **named) * x.shape[1]

    monkeypatch.setitem(vars(block), "forward", by_length)
    assert cached_step_difference(view) > 0.1
    monkeypatch.undo()
    assert cached_step_difference(view) < 1e-5
