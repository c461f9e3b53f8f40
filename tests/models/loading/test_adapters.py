"""Folders with a LoRA adapter: merged into its base, or refused with the reason."""

import json
import sys
import warnings
from functools import partial

import pytest
import torch
import transformers
import zoo
from checkpoint_folders import streamed, with_config
from zoo import logits

import tlspectral as tls
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.loading.adapters import load_merged
from tlspectral.models.loading.finding import find_source

NAME = "maker/model"


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


@pytest.fixture
def base(tmp_path):
    """A base with a tokenizer, in a folder of one's own."""
    return zoo.save_folder("neox", tmp_path / "base", tokenizer=True)


def saved_adapter(peft, base, path, **options):
    """Save an adapter with random weights; its logits on the base, without a merge."""
    settings = {"r": 4, "target_modules": ["query_key_value"], "task_type": "CAUSAL_LM", **options}
    model = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of tied embeddings, here and there
        adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **settings)).eval()
        adapted.save_pretrained(path)
    return logits(adapted)


edited = partial(with_config, described="adapter_config.json")


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("bridge", {}),
        ("bridge", {"use_dora": True, "use_rslora": True}),
        ("bridge", {"modules_to_save": ["embed_out"]}),
        pytest.param("hooked", {}, marks=zoo.needs_hooked),
    ],
)
def test_an_adapter_is_merged_into_its_base(peft, base, tmp_path, backend, options):
    expected = saved_adapter(peft, base, tmp_path / "adapter", **options)
    state = torch.random.get_rng_state()
    load_merged(find_source(tmp_path / "adapter"), torch.float32, None)
    assert torch.equal(torch.random.get_rng_state(), state)  # peft draws new adapters at random
    model = tls.load_model(tmp_path / "adapter", backend=backend)
    # Measured: at most 3e-6; without the adapter they differ by 1.
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)
    assert (logits(model) - logits(tls.load_model(base))).abs().max() > 0.1
    folder = str(tmp_path / "adapter")
    source = {"model": folder, "revision": None, "adapter": folder, "base": {"model": str(base), "revision": None}}
    assert model.tlspectral_source == source
    assert model.to_tokens("w5 w6", prepend_bos=False).tolist() == [[5, 6]]
    if not options and backend == "bridge":
        table = streamed(tmp_path / "adapter")  # a table names the base
        assert table.attrs["base"]["model"] == str(base)
        assert (table["D_head"] - streamed(base)["D_head"]).abs().max() > 0.01
        json.dumps(table.attrs, allow_nan=False)


def test_the_base_on_a_hub_at_the_revision_of_the_adapter(hub, peft, base, tmp_path):
    other = zoo.save_folder("neox", tmp_path / "other", seed=3)
    hub.publish(NAME, other)
    commit = hub.publish(NAME, base, branch="v2")
    expected = saved_adapter(peft, base, tmp_path / "adapter")
    edited(tmp_path / "adapter", base_model_name_or_path=NAME, revision="v2")
    for _ in range(2):
        model = tls.load_model(tmp_path / "adapter")
        torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)
        assert model.tlspectral_source["base"] == {"model": NAME, "revision": "v2", "commit": commit}
    assert hub.fetched.count("model.safetensors") == 1


@pytest.mark.tl4
@pytest.mark.slow
def test_adapters_of_training_steps_and_half_precision(peft, base, tmp_path):
    expected = saved_adapter(peft, base, tmp_path / "checkpoint-8")
    model = tls.load_model(tmp_path, checkpoint=8, dtype="bfloat16")
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert model.tlspectral_source["revision"] == "checkpoint-8"
    # bfloat16 has 8 bits: measured 0.08 on logits up to 4; without the adapter they differ by 1.
    assert (logits(model).float() - expected).abs().mean() < 0.05


def test_an_adapter_that_does_not_fit_its_base(peft, base, tmp_path):
    path = tmp_path / "adapter"
    saved_adapter(peft, base, path)
    smaller = transformers.AutoModelForCausalLM.from_pretrained(base, num_hidden_layers=1)
    smaller.save_pretrained(tmp_path / "smaller")
    edited(path, base_model_name_or_path=str(tmp_path / "smaller"))
    with pytest.raises(BadWeights, match=r"does not fit its base: it lacks 0 weights and has \d+ too many, such"):
        tls.load_model(path)
    edited(path, base_model_name_or_path=str(base), r=2)
    with pytest.raises(BadWeights, match=r"^peft \S+ cannot merge the adapter .* into its base: .*size mismatch"):
        tls.load_model(path)
    edited(path, r=4, a_setting_of_tomorrow=True)
    with pytest.raises(BadWeights, match=r"cannot merge the adapter .*a_setting_of_tomorrow"):
        tls.load_model(path)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(BadWeights, match=r"has an adapter_config\.json and no weights"):
        tls.load_model(path)


def test_a_merge_that_is_not_exact_is_refused(peft, base, tmp_path, monkeypatch):
    saved_adapter(peft, base, tmp_path / "adapter")
    layer = peft.tuners.lora.Linear
    merged = layer.get_delta_weight
    monkeypatch.setattr(layer, "get_delta_weight", lambda self, adapter: 0.9 * merged(self, adapter))
    with pytest.raises(UnsupportedArchitecture, match=r"^the merge that peft \S+ makes of .* does not compute what"):
        tls.load_model(tmp_path / "adapter")


LORA = {"target_modules": ["query_key_value"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}


@pytest.mark.tl4
@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("bridge", {"lora_dropout": 0.3}),
        *zoo.also_slow(("bridge", {"use_dora": True}), ("bridge", {"modules_to_save": ["embed_out"]})),
        pytest.param("hooked", {}, marks=zoo.needs_hooked),
    ],
)
def test_a_peft_model_is_read_with_its_adapter_and_stays_as_it_is(peft, backend, options):
    adapted = peft.get_peft_model(zoo.hf_model("neox"), peft.LoraConfig(**LORA, **options)).train()
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    kinds = [type(module) for module in adapted.modules()]
    model = tls.load_model(adapted, backend=backend)
    assert adapted.training
    assert [type(module) for module in adapted.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())
    # Measured: at most 3e-6; without the adapter they differ by 1.
    torch.testing.assert_close(logits(model), logits(adapted.eval()), atol=2e-5, rtol=0)
    assert (logits(model) - logits(zoo.hf_model("neox"))).abs().max() > 0.1
    kind = {"model": "GPTNeoXForCausalLM", "revision": None}
    named = {"model": "GPTNeoXForCausalLM with the adapter default", "revision": None}
    assert model.tlspectral_source == {**named, "adapter": "default", "base": kind}
    adapted.merge_adapter()  # as some training loops leave it
    torch.testing.assert_close(logits(tls.load_model(adapted)), logits(adapted), atol=2e-5, rtol=0)


def test_peft_models_that_are_refused(peft):
    adapted = peft.get_peft_model(zoo.hf_model("neox"), peft.LoraConfig(**LORA))
    with pytest.raises(UnsupportedArchitecture, match=r"holds an adapter of peft .* pass its PeftModel, what"):
        tls.load_model(adapted.get_base_model())  # peft puts its layers into the model itself
    adapted.base_model.disable_adapter_layers()
    with pytest.raises(UnsupportedArchitecture, match=r"does not compute .*turn its adapters on by enable_adapter_lay"):
        tls.load_model(adapted)
    other = peft.get_peft_model(zoo.hf_model("neox"), peft.PrefixTuningConfig("CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UnsupportedArchitecture, match=r"the adapter default is an adapter of kind PREFIX_TUNING"):
        tls.load_model(other)


def test_a_peft_model_in_16_bits_keeps_its_type(peft):
    adapted = peft.get_peft_model(zoo.hf_model("neox").to(torch.bfloat16), peft.LoraConfig(**LORA))
    model = tls.load_model(adapted)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert model.cfg.dtype == torch.bfloat16
    wide = tls.load_model(adapted, dtype="float32")
    # bfloat16 has 8 bits: measured 0.02 on logits up to 4; without the adapter they differ by 1.
    assert (logits(wide) - logits(adapted.eval()).float()).abs().mean() < 0.05


# --- what needs no peft ---


def described(path, config):
    """The folder of an adapter without weights, by changes of its description or by the text of it."""
    path.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "./nowhere"}
    text = config if isinstance(config, str) else json.dumps(settings | config)
    (path / "adapter_config.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"peft_type": "PREFIX_TUNING"}, UnsupportedArchitecture, "of kind PREFIX_TUNING for the task CAUSAL_LM; only"),
        ({"task_type": "SEQ_CLS"}, UnsupportedArchitecture, "of kind LORA for the task SEQ_CLS; only LoRA of causal"),
        ({"base_model_name_or_path": None}, BadWeights, "does not name the adapter's base"),
        ({}, FileNotFoundError, "is not there: There is no folder or file ./nowhere"),
        ({"base_model_name_or_path": "tiny-rope"}, UnsupportedArchitecture, "tiny-rope, is not a folder or hub model"),
        ("{", BadWeights, "adapter_config.json is no JSON"),
        ("[]", BadWeights, "adapter_config.json holds a list"),
    ],
)
def test_adapters_that_are_refused(monkeypatch, tmp_path, config, error, text):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    with pytest.raises(error) as raised:
        tls.load_model(described(tmp_path / "adapter", config))
    assert text in str(raised.value)
    assert str(tmp_path / "adapter") in str(raised.value)


def test_without_peft_the_command_that_installs_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "peft", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'needs the package peft: pip install "tlspectral\[adapters\]"'):
        tls.load_model(described(tmp_path / "adapter", {}))
