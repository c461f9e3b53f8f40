"""Objects of other libraries that `load_model` takes: stand-ins with the same attributes, and nnsight itself."""

import functools
import importlib.util
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
import zoo
from zoo import logits

import tlspectral as tls
from tlspectral.models.hooking.user_hooks import user_hooks
from tlspectral.models.reading import attention_view


class Forward:
    """What nnsight 0.8 stores as `forward` of every module: an object with the signature of the class's `forward`."""

    def __init__(self, module, state):
        functools.update_wrapper(self, type(module).forward)
        self.module, self.state = weakref.ref(module), state

    def __call__(self, *args, **options):
        return self.state.body(self.module(), *args, **options)

    def __deepcopy__(self, memo):
        return Forward(memo[id(self.module())], self.state)


Forward.__module__ = "nnsight.intervention.source"


class LanguageModel:
    """As nnsight's: no module itself, it passes questions on to the module that it wraps."""

    def __init__(self, module, tokenizer=None):
        self._module, self.tokenizer = module, tokenizer
        for part in module.modules():
            own = vars(part).get("forward")
            body = type(part).forward if own is None else lambda _, *args, own=own, **options: own(*args, **options)
            vars(part)["forward"] = Forward(part, SimpleNamespace(body=body, original=body))

    def __getattr__(self, name):
        return getattr(self._module, name)


def peers():
    """The stand-in, and nnsight's own class where it is installed."""
    installed = importlib.util.find_spec("nnsight") is not None
    return [LanguageModel, importlib.import_module("nnsight").NNsight] if installed else [LanguageModel]


@pytest.mark.tl4
@pytest.mark.parametrize("peer", peers())
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_the_model_in_an_object_of_nnsight_is_read(peer, backend):
    wrapped = peer(zoo.hf_model("llama"))
    forwards = [vars(module)["forward"] for module in wrapped._module.modules()]
    model = tls.load_model(wrapped, backend=backend)
    # Measured 7e-7; logits are up to 2.
    torch.testing.assert_close(logits(model), logits(zoo.hf_model("llama")), atol=1e-5, rtol=0)
    assert not user_hooks(model)
    tls.detect_heads(model, n_sequences=2)  # a hook of nnsight's in it would warn
    found = tls.hooks.check_hook(model, None, "L0H1").found
    assert not any("hooks are on" in sentence for sentence in found)  # nor on the object
    assert [vars(module)["forward"] for module in wrapped._module.modules()] == forwards
    assert model.tlspectral_source == {"model": "LlamaForCausalLM", "revision": None}


@pytest.mark.parametrize("peer", peers())
def test_a_forward_of_the_users_inside_nnsights_is_kept_and_named(peer):
    given = zoo.hf_model("llama")
    plain, mlp = logits(given), given.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: 0 * own(x)
    model = tls.load_model(peer(given))
    assert attention_view(model).source["user_hooks"] == {"blocks.0.mlp.forward": 1}
    assert (logits(model) - plain).abs().max() > 0.1


def test_the_tokenizer_in_an_object_of_nnsight_is_taken(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo.save_folder("llama", tmp_path, tokenizer=True))
    model = tls.load_model(LanguageModel(zoo.hf_model("llama"), tokenizer))
    assert model.to_tokens("w5 w6", prepend_bos=False).tolist() == [[5, 6]]
    assert tls.load_model(LanguageModel(zoo.hf_model("llama"), "w5")).tokenizer is None


def test_an_adapter_in_an_object_of_nnsight(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(zoo.hf_model("llama"), config).eval()
    expected = logits(adapted)
    model = tls.load_model(LanguageModel(adapted))
    torch.testing.assert_close(logits(model), expected, atol=2e-5, rtol=0)  # measured 1e-6; without the adapter 1
    assert model.tlspectral_source["adapter"] == "default"


@pytest.mark.tl4
@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_a_model_of_transformer_lens_comes_back_as_it_is(backend):
    model = getattr(zoo, backend)("llama")
    before = set(vars(model))
    assert tls.load_model(model) is model
    assert set(vars(model)) == before
    assert tls.load_model(LanguageModel(model)) is model  # nnsight's object sets a forward
    assert attention_view(model).source["model"] == model.cfg.model_name
    packaged = tls.load_model("tiny-rope", backend=backend)
    source = packaged.tlspectral_source
    assert tls.load_model(packaged, backend=backend, device="cpu", dtype=torch.float32) is packaged
    assert packaged.tlspectral_source is source
    assert attention_view(getattr(zoo, backend)("llama")).weights_digest() == attention_view(model).weights_digest()
