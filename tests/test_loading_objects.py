"""Models of transformers that are loaded already: what is made of them, and that they stay as they are."""

import shutil

import family_configs
import pytest
import tokenizer_kinds
import torch
import transformers
import zoo

import tlspectral as tls
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.attention import attention_view
from tlspectral.models.loading.agreement import log_probabilities

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
    model.eval()
    with torch.no_grad():
        output = model(zoo.prompt())
    return getattr(output, "logits", output)


def assert_object_is_read(name, backend):
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_model_object_is_read_and_stays_as_it_is(backend, name):
    assert_object_is_read(name, backend)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", zoo.RIGHT + zoo.LENGTH_DEPENDENT)
def test_objects_of_every_architecture(backend, name):
    if backend == "hooked" and name not in zoo.HOOKED_ARCHITECTURES:
        pytest.skip("TransformerLens converts no such model")
    assert_object_is_read(name, backend)


def test_the_table_of_an_object_is_that_of_its_folder(folder):
    settings = {"null_draws": 3, "detectors": False, "show_progress": False}
    given = transformers.AutoModelForCausalLM.from_pretrained(folder("llama"))
    table = tls.analyze_heads(tls.load_model(given), **settings)
    expected = tls.analyze_heads(tls.load_model(folder("llama")), **settings)
    assert table.equals(expected)
    assert table.attrs["weights_sha256"] == expected.attrs["weights_sha256"]
    assert table.attrs["model"] == str(folder("llama"))


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


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_what_transformers_itself_hooks_to_record_patterns_is_no_hook_of_the_users(name):
    given = zoo.hf_model(name)
    given(zoo.prompt(), output_attentions=True)
    assert any(module._forward_hooks for module in given.modules())
    model = tls.load_model(given)  # a warning would be an error here
    tls.verify_scores(model)
    assert logits(given).shape == logits(model).shape


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


def test_the_commit_is_that_of_the_config_or_of_its_folder(hub, tokenized):
    """Some versions of transformers write the commit of a hub model into its config, others nowhere."""
    commit = hub.publish("maker/model", tokenized)
    hub.put_in_cache("maker/model", *(path.name for path in tokenized.iterdir()))
    by_name = transformers.AutoModelForCausalLM.from_pretrained("maker/model", local_files_only=True)
    known = {"commit": by_name.config._commit_hash} if hasattr(by_name.config, "_commit_hash") else {}
    assert tls.load_model(by_name).tlspectral_source == {"model": "maker/model", "revision": None, **known}
    by_name.config._commit_hash = commit
    source = tls.load_model(by_name).tlspectral_source
    assert source == {"model": "maker/model", "revision": None, "commit": commit}
    snapshot_folder = hub.cache / "models--maker--model" / "snapshots" / commit
    of_folder = transformers.AutoModelForCausalLM.from_pretrained(snapshot_folder)
    source = tls.load_model(of_folder).tlspectral_source
    assert source == {"model": str(snapshot_folder), "revision": None, "commit": commit}


# --- tokenizers ---


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


# --- refusals ---


def test_arguments_that_an_object_cannot_have(tokenized):
    given = zoo.hf_model("llama")
    for options in ({"revision": "main"}, {"checkpoint": 3}):
        with pytest.raises(ValueError, match="this LlamaForCausalLM is loaded; it has no revision or checkpoint"):
            tls.load_model(given, **options)
    with pytest.raises(TypeError, match="tokenizer= takes a tokenizer of transformers, and found str"):
        tls.load_model(given, tokenizer="gpt2")
    with pytest.raises(ValueError, match="tiny-rope knows no text, so it takes no tokenizer"):
        tls.load_model("tiny-rope", tokenizer=transformers.AutoTokenizer.from_pretrained(tokenized))
    with pytest.raises(ValueError, match="revision='main' has nothing to choose"):
        tls.analyze_heads(zoo.shared("bridge", "llama"), revision="main")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_model_of_transformers(backend):
    with pytest.raises(TypeError, match=r"and found TransformerBridge; it is a TransformerLens model already"):
        tls.load_model(zoo.shared("bridge", "llama"), backend=backend)
    with pytest.raises(TypeError, match=r"and found Linear; give one of these"):
        tls.load_model(torch.nn.Linear(2, 2), backend=backend)
    with pytest.raises(TypeError, match=r"make one with tlspectral\.load_model, of a name or of a model of transf"):
        tls.analyze_heads(zoo.hf_model("llama"))


def test_other_kinds_of_models_are_refused():
    for given in (zoo.hf_model("llama").model, zoo.hf_model("bert")):
        with pytest.raises(UnsupportedArchitecture, match=rf"this {type(given).__name__} is no causal language model"):
            tls.load_model(given)


def test_weights_that_are_not_there_or_quantised_are_refused():
    given = zoo.hf_model("llama")
    given.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(BadWeights, match=r"quantised weights \(bitsandbytes\).*made from, without quantization_config"):
        tls.load_model(given)
    given = zoo.hf_model("llama")
    packed = given.model.layers[1].self_attn.k_proj
    packed.weight = torch.nn.Parameter(packed.weight.to(torch.uint8), requires_grad=False)
    with pytest.raises(BadWeights, match=r"model\.layers\.1\.self_attn\.k_proj\.weight of .* is torch\.uint8, a quant"):
        tls.load_model(given)
    with pytest.raises(BadWeights, match="on the meta device, without values"):
        tls.load_model(zoo.hf_model("llama").to("meta"))


def test_a_model_that_accelerate_moves_is_refused():
    hooks = pytest.importorskip("accelerate.hooks")
    given = zoo.hf_model("llama")
    hooks.add_hook_to_module(given.model.layers[0], hooks.AlignDevicesHook("cpu"))
    with pytest.raises(UnsupportedArchitecture, match=r"\(model\.layers\.0 is moved by accelerate\); load it onto one"):
        tls.load_model(given)


def test_a_folder_in_the_hubs_cache_names_its_commit_on_every_road(hub, tokenized, tmp_path):
    commit = hub.publish("maker/model", tokenized)
    hub.put_in_cache("maker/model", *(path.name for path in tokenized.iterdir()))
    cached = hub.cache / "models--maker--model" / "snapshots" / commit
    settings = {"null_draws": 2, "detectors": False, "layers": [0], "show_progress": False}
    for model in (cached, "maker/model", tls.load_model(cached), tls.load_model("maker/model")):
        assert tls.analyze_heads(model, **settings).attrs["commit"] == commit
    assert "commit" not in tls.load_model(shutil.copytree(cached, tmp_path / "elsewhere")).tlspectral_source


@pytest.mark.parametrize("road", ["folder", "object"])
def test_a_model_that_float64_cannot_run_is_not_blamed_on_its_config(tmp_path, road):
    """GPT-OSS multiplies by its experts with a kernel of torch that has no float64."""
    model = transformers.GptOssForCausalLM(family_configs.tiny_config("gpt_oss"))
    if road == "folder":
        model.save_pretrained(tmp_path)
        config = (tmp_path / "config.json").read_text()
    given = tmp_path if road == "folder" else model
    message = "GptOssForCausalLM runs in float32 and not in float64, .*Double"
    with pytest.raises(UnsupportedArchitecture, match=message) as said:
        tls.load_model(given, dtype="float64")
    assert "dtype='float32'" in str(said.value)
    assert "config.json" not in str(said.value)
    assert tls.load_model(given, dtype="float32").cfg.n_layers == 2
    if road == "object":
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    else:
        assert (tmp_path / "config.json").read_text() == config


def test_a_model_that_runs_in_no_type_keeps_its_error(monkeypatch):
    model = zoo.hf_model("llama").double()
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: hidden @ hidden)  # no square matrix
    with pytest.raises(RuntimeError, match=r"Expected size|must match|mat1"):
        log_probabilities(model)
