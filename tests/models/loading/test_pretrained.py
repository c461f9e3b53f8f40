"""Models of transformers that are loaded already: what is made of them, and that they stay as they are."""

import shutil

import pytest
import tokenizer_kinds
import torch
import transformers
import zoo
from checkpoint_folders import streamed

import tlspectral as tls
from tlspectral.models.reading import attention_view

BACKENDS = ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)]


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory):
    """A Llama with its tokenizer, in a folder. Not to be changed."""
    return tokenizer_kinds.save_tokenized("llama", tmp_path_factory.mktemp("tokenized") / "llama")


def given_model(name):
    """A model as users have it: in training mode, with PyTorch's attention where there is a choice."""
    model = zoo.hf_model(name)
    if model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    return model.train()


def snapshot(model):
    """All that must not change: modules, hooks, parameters and where they lie, settings."""
    modules = [(name, id(module), type(module), module.training) for name, module in model.named_modules()]
    hooks = [list(module._forward_hooks.items()) for module in model.modules()]
    parameters = [(name, id(value), value.data_ptr(), value.requires_grad) for name, value in model.named_parameters()]
    return modules, hooks, parameters, model.config.to_dict(), model.config._attn_implementation


def logits(model):
    return zoo.logits(model.eval())


# Of learned positions: `generate` of a HookedTransformer counts them twice.
@pytest.mark.fast(1)
@pytest.mark.filterwarnings("ignore:.*loses the key/value cache")
@pytest.mark.tl4
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in ("gpt2", "llama")))
        for name in zoo.RIGHT + zoo.LENGTH_DEPENDENT
    ],
)
def test_a_model_object_is_read_and_stays_as_it_is(backend, name):
    if backend == "hooked" and name not in zoo.HOOKED_ARCHITECTURES:
        pytest.skip("TransformerLens converts no such model")
    given = given_model(name)
    expected, state = logits(given), {key: value.clone() for key, value in given.state_dict().items()}
    given.train()
    before = snapshot(given)
    model = tls.load_model(given, backend=backend)
    # Measured: at most 1.2e-6 between eager and PyTorch's attention; a rope scaling left out gives 0.4.
    torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0)
    tls.verify_scores(model)
    assert snapshot(given) == before
    assert all(torch.equal(value, state[key]) for key, value in given.state_dict().items())
    assert torch.equal(logits(given), expected)
    assert model.tlspectral_source == {"model": type(given).__name__, "revision": None}
    shared = {value.data_ptr() for value in model.parameters()} & {value.data_ptr() for value in given.parameters()}
    assert len(shared) == (len(list(given.parameters())) if backend == "bridge" else 0)


def test_hooks_of_an_object_stay_there_and_do_not_act_in_the_copy():
    given, seen = zoo.hf_model("llama"), []
    plain = logits(given)
    given.model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(0) or output * 2)
    steered = logits(given)
    before = snapshot(given)
    seen.clear()
    with pytest.warns(UserWarning, match=r"has hooks of PyTorch on model\.layers\.0; they stay there, and do not act"):
        model = tls.load_model(given)
    torch.testing.assert_close(logits(model), plain, atol=1e-5, rtol=0)  # measured 6e-7; the hook moves them by 0.5
    assert seen == []
    assert snapshot(given) == before
    assert torch.equal(logits(given), steered)


def test_what_transformers_itself_hooks_to_record_patterns_is_no_hook_of_the_users():
    given = zoo.hf_model("llama")
    given(zoo.prompt(), output_attentions=True)
    assert any(module._forward_hooks for module in given.modules())
    tls.verify_scores(tls.load_model(given))  # a warning would be an error here


def test_type_and_device_are_those_of_the_object_unless_others_are_given():
    given = zoo.hf_model("llama").to(torch.bfloat16)
    model = tls.load_model(given)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert model.cfg.dtype == torch.bfloat16
    wide = tls.load_model(given, dtype="float32", device="cpu")
    assert {value.dtype for value in wide.parameters()} == {torch.float32}
    assert {value.dtype for value in given.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(wide.W_E, given.get_input_embeddings().weight.float(), atol=0, rtol=0)


def test_a_change_in_place_shows_in_both_and_tying_is_kept():
    given = zoo.hf_model("gpt2")
    model = tls.load_model(given)
    assert given.lm_head.weight is given.transformer.wte.weight
    with torch.no_grad():
        given.transformer.wte.weight.mul_(2)
    torch.testing.assert_close(logits(model), logits(given), atol=1e-5, rtol=0)  # measured 6e-7; they grew by 1


@pytest.mark.tl4
@pytest.mark.slow
def test_the_commit_of_a_model_in_the_hubs_cache_is_named_on_every_road(hub, tokenized, tmp_path):
    """Some versions of transformers write the commit of a hub model into its config, others nowhere."""
    commit = hub.publish("maker/model", tokenized)
    hub.put_in_cache("maker/model", *(path.name for path in tokenized.iterdir()))
    cached = hub.cache / "models--maker--model" / "snapshots" / commit
    by_name = transformers.AutoModelForCausalLM.from_pretrained("maker/model", local_files_only=True)
    by_name.config._commit_hash = commit
    source = tls.load_model(by_name).tlspectral_source
    assert source == {"model": "maker/model", "revision": None, "commit": commit}
    of_folder = transformers.AutoModelForCausalLM.from_pretrained(cached)
    source = tls.load_model(of_folder).tlspectral_source
    assert source == {"model": str(cached), "revision": None, "commit": commit}
    for name in (cached, "maker/model"):
        assert tls.load_model(name).tlspectral_source["commit"] == commit
        assert streamed(name, heads="L0").attrs["commit"] == commit
    assert "commit" not in tls.load_model(shutil.copytree(cached, tmp_path / "elsewhere")).tlspectral_source


# --- tokenizers ---


@pytest.mark.fast(2)
@pytest.mark.tl4
@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("road", ["object", "folder"])
def test_a_tokenizer_that_is_given_is_used_and_stays_as_it_is(tokenized, tmp_path, backend, road):
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenized)
    tokenizer.add_tokens(["abba"])
    tokenizer.name_or_path = "maker/on-the-hub"
    before = tokenizer.padding_side, tokenizer.pad_token, len(tokenizer), tokenizer.name_or_path
    expected = tokenizer(tokenizer_kinds.TEXT, add_special_tokens=False).input_ids
    assert expected != tokenizer_kinds.IDS["llama"]
    model = tls.load_model(
        zoo.hf_model("llama") if road == "object" else tokenized, backend=backend, tokenizer=tokenizer
    )
    assert model.to_tokens(tokenizer_kinds.TEXT, prepend_bos=False).tolist() == [expected]
    assert model.to_tokens(tokenizer_kinds.TEXT, prepend_bos=True).tolist() == [[1, *expected]]
    assert attention_view(model).start_token == 1
    assert (tokenizer.padding_side, tokenizer.pad_token, len(tokenizer), tokenizer.name_or_path) == before


def test_a_tokenizer_that_is_given_is_not_fetched(hub, tokenized):
    hub.publish("maker/model", tokenized)
    model = tls.load_model("maker/model", tokenizer=transformers.AutoTokenizer.from_pretrained(tokenized))
    assert model.to_tokens(tokenizer_kinds.TEXT, prepend_bos=False).tolist() == [tokenizer_kinds.IDS["llama"]]
    assert "tokenizer.json" not in hub.asked
