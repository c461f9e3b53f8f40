"""What load_model and tables from files refuse: the error, and the words that say what is wrong and what to do."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
import transformers
import zoo
from checkpoint_folders import ROADS, sharded, tensors_of, with_config, with_files, with_tensors
from family_configs import tiny_config
from safetensors.torch import load_file, save_file

import tlspectral as tls
from tlspectral.errors import BadWeights, ScoreMismatch, UnsupportedArchitecture
from tlspectral.models.loading import hub
from tlspectral.models.loading.finding import find_source

pytestmark = pytest.mark.usefixtures("no_network")

load = tls.load_model


# --- names and arguments ---


@pytest.mark.parametrize(
    ("name", "options", "error", "words"),
    [
        ("./nowhere", {}, FileNotFoundError, "no folder or file ./nowhere"),
        ("nowhere/at/all", {}, FileNotFoundError, "no folder or file"),
        ("nowhere.gguf", {}, FileNotFoundError, "no file nowhere.gguf"),
        ("not a name!", {}, ValueError, "neither a path on this machine nor a hub id"),
        ("nobody/nothing", {}, ValueError, "not a folder, a .gguf file or a cached hub model"),
        ("nobody/nothing", {"revision": "x"}, ValueError, "'nobody/nothing' at revision 'x' is not"),
        ("nobody/nothing", {"checkpoint": 3}, ValueError, "not known how nobody/nothing names its training steps"),
        ("EleutherAI/pythia-70m", {"checkpoint": 3, "revision": "step3"}, ValueError, "give one of them"),
        ("EleutherAI/pythia-70m", {"checkpoint": -1}, ValueError, "checkpoint=-1 is not a training step"),
        (
            "EleutherAI/pythia-70m",
            {"checkpoint": True},
            ValueError,
            "checkpoint= must be a whole number or None; found True",
        ),
        ("gpt2", {"backend": "tensor"}, ValueError, "backend='tensor' is not known: give 'auto', 'bridge' or 'hooked'"),
        ("acme/main@v2", {}, ValueError, "a branch, tag or commit is an argument; give 'acme/main', revision='v2'"),
        ("gpt2@main", {}, ValueError, "give 'gpt2', revision='main'"),
        ("tiny-rop", {}, ValueError, "; did you mean 'tiny-rope'?"),
        ("smollm2", {}, ValueError, "; did you mean 'smollm2-135m'?"),
        ("tiny rope", {}, ValueError, "; did you mean 'tiny-rope'?"),
        ("tiny-rope", {"revision": "v2"}, ValueError, "no revision or checkpoint to choose"),
        ("tiny-rope", {"device": "abacus"}, ValueError, "device='abacus' cannot be used here"),
        ("gpt2", {"dtype": "int8"}, ValueError, "dtype='int8' is not a floating-point type"),
    ],
)
def test_wrong_arguments(name, options, error, words):
    with pytest.raises(error) as raised:
        load(name, **options)
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name", ["tiny_rope", "TinyRope", "tiny-rop", "smollm2", "SmolLM2-135M-Instruct", "gemma3_270m", "minilm"]
)
def test_a_name_near_a_demo_model_is_refused_before_the_hub_is_asked(name, monkeypatch):
    monkeypatch.setattr(hub, "first_file", lambda *given: pytest.fail("the hub was asked"))
    with pytest.raises(ValueError, match=r"demo model \(tiny-ape, .*\); did you mean '"):
        load(name)


# A short name of TransformerLens, its names that resemble a demo model, names with an owner, and names unlike any.
@pytest.mark.parametrize("name", ["gpt2", "gemma-3-270m", "tiny-stories-1M", "maker/tiny_rope", "distilgpt2", "nosuch"])
def test_other_names_still_go_to_the_hub(name):
    assert find_source(name).kind == "hub"


def test_an_unknown_name_without_an_owner_is_answered_with_the_demo_models():
    with pytest.raises(
        ValueError, match=r"^'nosuch' is not a demo model \(tiny-ape, .*, minilm-l6\), a folder, a .gguf"
    ):
        load("nosuch")


def test_files_and_folders_that_are_no_checkpoint(folder, tmp_path):
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"GGUF and then nothing")
    (tmp_path / "other.gguf").write_bytes(b"GGML....")
    for call, error, words in (
        (lambda: load(folder("llama") / "model.safetensors"), ValueError, r"is a file but not a \.gguf file"),
        (lambda: load(folder("llama"), revision="v2"), ValueError, "local folder, which has no revision='v2'"),
        (lambda: load(fake, checkpoint=1), ValueError, "no revision or checkpoint to choose"),
        (lambda: load(tmp_path / "other.gguf"), ValueError, "does not begin as a GGUF file does"),
    ):
        with pytest.raises(error, match=words):
            call()


# --- objects ---


def llama(change=lambda model: None):
    model = zoo.hf_model("llama")
    change(model)
    return model


def packed(model):
    projection = model.model.layers[1].self_attn.k_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.uint8), requires_grad=False)


def moved_by_accelerate(model):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(model.model.layers[0], hooks.AlignDevicesHook("cpu"))


OBJECTS = {
    "a revision": (
        lambda: load(llama(), revision="main"),
        ValueError,
        "LlamaForCausalLM is loaded; it has no revision",
    ),
    "a step": (lambda: load(llama(), checkpoint=3), ValueError, "it has no revision or checkpoint"),
    "a name as tokenizer": (
        lambda: load(llama(), tokenizer="gpt2"),
        TypeError,
        "'gpt2' is not a tokenizer of transformers",
    ),
    "text of a tiny model": (
        lambda: load("tiny-rope", tokenizer=zoo._tokenizer()),
        ValueError,
        "rope was not trained on text",
    ),
    "a bridge in another type": (
        lambda: load(zoo.shared("bridge", "llama"), dtype="float64", backend="hooked" if zoo.HAS_HOOKED else "auto"),
        ValueError,
        r"TransformerBridge is loaded already and comes back as it is, so .*dtype= cannot be followed: leave this out",
    ),
    "a module": (
        lambda: load(torch.nn.Linear(2, 2)),
        TypeError,
        "of transformers, a PeftModel of peft, a LanguageModel of nnsight, .*HookedTransformer, and found a Linear",
    ),
    "a module in nnsight's wrapper": (
        lambda: load(SimpleNamespace(_module=torch.nn.Linear(2, 2))),
        TypeError,
        "and found a Linear; give one of these",
    ),
    "nnsight without weights": (
        lambda: load(SimpleNamespace(_module=llama().to("meta"))),
        BadWeights,
        r"SimpleNamespace of nnsight has not loaded its weights yet; make it with dispatch=True, or call its dispatch",
    ),
    "a body without head": (
        lambda: load(llama().model),
        UnsupportedArchitecture,
        "LlamaModel is not a causal language",
    ),
    "an encoder": (
        lambda: load(transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(n_layers=1, dim=12))),
        UnsupportedArchitecture,
        r"model type distilbert\); causal language models are read, and of encoders BERT and RoBERTa",
    ),
    "quantised": (lambda: load(llama(packed)), BadWeights, r"layers\.1\.self_attn\.k_proj\.weight of .* torch\.uint8"),
    "without values": (lambda: load(llama().to("meta")), BadWeights, "on the meta device, without values"),
    "spread over devices": (
        lambda: load(llama(moved_by_accelerate)),
        UnsupportedArchitecture,
        r"\(model\.layers\.0 is moved by accelerate\); load it onto one",
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), OBJECTS.values(), ids=OBJECTS)
def test_objects(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --- HookedTransformer ---


def with_a_window(path):
    return with_config(path, use_sliding_window=True, sliding_window=64, layer_types=["sliding_attention"] * 2)


@zoo.needs_hooked
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("yarn", 'ignores the yarn rope scaling .* use backend="bridge"'),
        ("phi3_longrope", "ignores the longrope rope scaling"),
        ("dynamic", "ignores the dynamic rope scaling"),
        ("gemma2", r'has no HookedTransformer of .* Use backend="bridge"'),
        ("smollm3", "has no HookedTransformer of"),
        ("mamba", "has no HookedTransformer of"),
        ("deepseek_v3", "has no HookedTransformer of"),
        ("qwen2", "ignores the sliding window of 64 tokens"),
    ],
)
def test_what_hooked_transformer_does_not_compute(copied, name, words):
    path = with_a_window(copied(name)) if name == "qwen2" else copied(name)
    with pytest.raises(UnsupportedArchitecture, match=words):
        load(path, backend="hooked")


@zoo.needs_hooked
def test_what_no_rule_names_is_caught_by_comparing_with_the_checkpoint(folder, monkeypatch):
    monkeypatch.setattr("tlspectral.models.loading.building_hooked._check_positions", lambda *_: None)
    with pytest.raises(UnsupportedArchitecture, match=r"does not compute what the checkpoint does \(log-prob"):
        load(folder("yarn"), backend="hooked")


@pytest.mark.skipif(zoo.HAS_HOOKED, reason="TransformerLens 3 has HookedTransformer")
def test_hooked_on_transformer_lens_4(folder):
    with pytest.raises(ImportError, match=r'removed in TransformerLens 4: use backend="bridge", or .*lens<4'):
        load(folder("llama"), backend="hooked")


# --- folders ---


def refused(change, error=BadWeights, *, loaded=None, streamed=None, both=None, name="llama"):
    """A change of a folder, and the error and its words on each road; a road may have an error of its own."""
    words = {"loaded": loaded or both, "streamed": streamed or both}
    said = {road: word if isinstance(word, tuple) else (error, word) for road, word in words.items() if word}
    return name, change, said


def cut(size):
    def change(path):
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return change


def without(file):
    return lambda path: (path / file).unlink()


def configured(**changes):
    return lambda path: with_config(path, **changes)


def with_a_whole_file(path):
    """The folder of shards gets a file of other weights, which transformers would load."""
    whole = {name: 2 * value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}
    save_file(whole, path / "model.safetensors", {"format": "pt"})


def in_shards(change):
    def change_shards(path):
        sharded(path)
        change(path)

    return change_shards


def with_tensors_twice(path):
    """Two files that no index names, with a tensor in both."""
    held = tensors_of(path)
    for file in ("a", "b"):
        save_file(held, path / f"{file}.safetensors", {"format": "pt"})
    (path / "model.safetensors").unlink()


def quantised(**settings):
    return configured(quantization_config=settings)


def tensors(**changes):
    """Change tensors of layer 1 by functions, and take out those that are None."""

    def change(path):
        held = tensors_of(path)
        names = {kind: f"model.layers.1.{kind.replace('__', '.')}.weight" for kind in changes}
        with_tensors(path, {names[kind]: made and made(held[names[kind]]) for kind, made in changes.items()})

    return change


def named(change):
    """Change the names of all tensors."""

    def changed(path):
        held = tensors_of(path)
        with_tensors(path, dict.fromkeys(held) | {change(name): value for name, value in held.items()})

    return changed


def with_a_nan(value):
    value = value.clone()
    value[3, 4] = torch.nan
    return value


def beside(kind):
    def change(path):
        name = "model.layers.1.self_attn.q_proj"
        with_tensors(path, {f"{name}.{kind}": torch.ones(4), **({f"{name}.weight": None} if kind == "qweight" else {})})

    return change


def code_beside(path):
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    with_config(path, model_type="own", auto_map=classes)
    (path / "own.py").write_text("raise SystemExit('run')\n")


def index_outside(kind):
    def change(path):
        index = sharded(path, kind)
        with_files(index, lambda name, file: f"../{file}" if name == "model.norm.weight" else file)

    return change


def index_of(text):
    return lambda path: sharded(path).write_text(text)


def index_of_pickles(path):
    index = sharded(path)
    with_files(index, lambda name, file: file.replace(".safetensors", ".bin"))


def index_of_too_much(path):
    index = sharded(path)
    file_of = json.loads(index.read_text())["weight_map"]
    other, promised = file_of["model.layers.0.self_attn.q_proj.weight"], "model.layers.1.self_attn.k_proj.weight"
    with_files(index, lambda name, file: other if name == promised else file)


def a_shard(change):
    def changed(path):
        files = json.loads(sharded(path).read_text())["weight_map"]
        change(path / files["model.layers.1.self_attn.q_proj.weight"])

    return changed


def adapter_beside(path):
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def same(path):
    pass


NO_INDEX = r"model\.safetensors\.index\.json is no index of safetensors files"
CUT = r"\.safetensors cannot be read as safetensors .*; fetch it again"
OTHER_SHAPES = r"do not have the shapes that its config\.json asks for"
FOLDERS = {
    "no config": refused(without("config.json"), FileNotFoundError, both=r"no config\.json"),
    "a damaged config": refused(lambda path: (path / "config.json").write_text("{"), both=r"config\.json is no JSON"),
    "no weights": refused(
        without("model.safetensors"), FileNotFoundError, loaded="cannot be loaded", streamed="holds no weights"
    ),
    "pickles": refused(
        lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin"),
        streamed=r"no safetensors \(its weights are in pytorch_model\.bin, a pickle\)",
    ),
    "nothing of the file": refused(cut(0), both=CUT),
    "an end that is cut off": refused(cut(-100), both=CUT),
    "a weight that is missing": refused(
        tensors(self_attn__q_proj=None),
        loaded=r"lacks 1 of the weights .* model\.layers\.1\.self_attn\.q_proj\.weight",
        streamed=r"layer 1: .*lacks 1 of its weights, such as model\.layers\.1\.self_attn\.q_proj",
    ),
    "layers that the files do not hold": refused(
        configured(num_hidden_layers=3),
        loaded=r"lacks \d+ of the weights .* model\.layers\.2\.",
        streamed=r"layer 2: the files of .* hold no tensors of this layer",
    ),
    "a norm that is missing": refused(
        tensors(input_layernorm=None), streamed=r"layer 1: .*such as model\.layers\.1\.input_layernorm\.weight"
    ),
    "names with a wrapper in front": refused(
        named(lambda name: f"base_model.model.{name}"),
        loaded=r"lacks 21 of .*names in its files hold base_model\.model, such as base_model\.model\.lm_head",
    ),
    "names with a wrapper within": refused(
        named(lambda name: name.replace("self_attn.", "_fsdp_wrapped_module.self_attn.")),
        both=r"hold _fsdp_wrapped_module, such as model\.layers\.0\._fsdp_wrapped_module\.self_attn",
    ),
    "a wrapper, and a tensor that is another model's": refused(
        named(lambda name: name.replace("1.self_attn.k_proj", "1.self_attn.own.other")),
        both=r"self_attn\.own\.other\.weight, which fits no parameter .*Correct config\.json",
    ),
    "a classifier": refused(
        lambda path: with_tensors(
            with_config(path, architectures=["LlamaForSequenceClassification"]), {"lm_head.weight": None}
        ),
        loaded=r"lm_head\.weight; .* describes a LlamaForSequenceClassification: load the language model that",
    ),
    "a weight of another shape": refused(
        tensors(self_attn__k_proj=lambda value: value[:16].clone()),
        loaded=OTHER_SHAPES,
        streamed=r"layers\.1\.self_attn\.k_proj\.weight .*has shape \(16, 48\).*asks for \(24, 48\)",
    ),
    "a config of other shapes": refused(
        configured(hidden_size=64),
        loaded=OTHER_SHAPES,
        streamed=r"has shape \(97, 48\), and config\.json asks for \(97, 64\)",
    ),
    "a weight that is no number": refused(
        tensors(self_attn__k_proj=with_a_nan),
        loaded=r"layers\.1\.self_attn\.k_proj\.weight of .*: 1 of \d+ values are NaN or infinite",
        streamed="layer 1, W_K: 1 of",
    ),
    "GPTQ": refused(quantised(quant_method="gptq"), both=r"\(gptq\), .*or load the model that they were made from"),
    "bitsandbytes": refused(
        quantised(quant_method="bitsandbytes", load_in_4bit=True),
        both=r"\(bitsandbytes\), and files .* give the model object that AutoModelForCausalLM\.from_pretrained",
    ),
    "an old config of bitsandbytes": refused(
        quantised(load_in_8bit=True), both=r"\(bitsandbytes\), and files of these are not"
    ),
    "packed weights without a word in the config": refused(
        beside("qweight"), both=r"quantised weights \(.*q_proj\.qweight .*config\.json does not say so"
    ),
    "scales without a word in the config": refused(
        beside("SCB"), both=r"quantised weights \(.*q_proj\.SCB .*config\.json does not say so"
    ),
    "bytes": refused(
        tensors(self_attn__q_proj=lambda value: value.to(torch.int8)),
        streamed=r"layer 1: .*q_proj\.weight is stored as I8, a quantised format",
    ),
    "a whole model beside an adapter": refused(
        adapter_beside, both=r"holds an adapter \(adapter_config\.json\) and a whole model"
    ),
    "code of its own, which is not run": refused(
        code_beside,
        UnsupportedArchitecture,
        loaded="transformers does not load",
        streamed=r"is not understood.*model\.layers\.N\.self_attn",
    ),
    "an encoder": refused(
        lambda path: transformers.DistilBertConfig().save_pretrained(path),
        UnsupportedArchitecture,
        both=r"not a causal language model \(model type distilbert\)",
    ),
    "an encoder that is loaded whole": refused(
        same, UnsupportedArchitecture, streamed="its model type is bert", name="bert"
    ),
    "an encoder-decoder": refused(
        lambda path: transformers.T5Config().save_pretrained(path),
        UnsupportedArchitecture,
        both=r"encoder-decoder model \(model type t5\)",
    ),
    "no attention": refused(
        same,
        UnsupportedArchitecture,
        streamed=r"model type is mamba.*backbone\.layers\.N\.mixer\.x_proj\.weight.*pass a loaded",
        name="mamba",
    ),
    "a softcap that transformers ignores": refused(
        same,
        UnsupportedArchitecture,
        loaded="does not compute what the checkpoint does",
        streamed="layer 0: Gemma 3 with attn_logit_softcapping",
        name="gemma3_with_softcap",
    ),
    "an index that leads out of the folder": refused(
        index_outside("safetensors"),
        both=r"names \.\./.*, which is not a safetensors file in its folder",
    ),
    "an index of pickles that leads out of the folder": refused(
        index_outside("pickles"), loaded=r"names \.\./.*, which is not a PyTorch file in its"
    ),
    "an index that names pickles": refused(index_of_pickles, both=r"\.bin, which is not a safetensors file in its"),
    "a number for the files": refused(index_of('{"weight_map": 3}'), both=NO_INDEX),
    "an index of nothing": refused(index_of("{}"), both=NO_INDEX),
    "an index that promises too much": refused(
        index_of_too_much,
        both=r"index\.json says that model\.layers\.1\.self_attn\.k_proj\.weight is in .*, and it is in",
    ),
    "an index of a tensor that no shard holds": refused(
        a_shard(lambda file: save_file({}, file)),
        loaded=r"lacks \d+ of the weights",
        streamed=r"does not hold model\.layers\.1\.self_attn\.q_proj\.weight, which",
    ),
    "shards and a whole file": refused(
        in_shards(with_a_whole_file),
        both=r"holds model\.safetensors and model\.safetensors\.index\.json, which names \d+ other files",
    ),
    "a tensor in two files": refused(with_tensors_twice, streamed=r"a\.safetensors and b\.safetensors both hold"),
    "a shard that is not there": refused(
        a_shard(lambda file: file.unlink()),
        loaded=r"\.safetensors cannot be read as safetensors",
        streamed=r"\.safetensors.*is not there",
    ),
    "a shard that is cut off": refused(a_shard(lambda file: file.write_bytes(file.read_bytes()[:-10])), both=CUT),
}


# What only shows once a layer's numbers are read; the rest is refused before the first layer.
AS_NUMBERS = ("a weight that is no number", "a softcap that transformers ignores")


@pytest.mark.parametrize(
    ("what", "road"), [(what, road) for what, (_, _, by_road) in FOLDERS.items() for road in by_road]
)
def test_folders(copied, monkeypatch, tmp_path, what, road):
    name, change, by_road = FOLDERS[what]
    path, options = copied(name), {}
    change(path)
    if road == "streamed":
        monkeypatch.setattr("torch.load", lambda *_, **__: pytest.fail("a pickle was opened"))
        options = {"folder": tmp_path / "parts"}
    error, words = by_road[road]
    with pytest.raises(error, match=words):
        ROADS[road](path, **options)
    assert what in AS_NUMBERS or not (tmp_path / "parts").exists()


@pytest.mark.tl4
@pytest.mark.slow
@pytest.mark.skipif(not zoo.READ_WRONG, reason="right on TransformerLens 4")
def test_a_bridge_with_other_logits(folder):
    with pytest.raises(UnsupportedArchitecture, match=r"^the bridge that TransformerLens 3\.\S+ makes of .*cohere"):
        load(folder("cohere"))
    with pytest.raises(ScoreMismatch, match="no table is returned"):
        ROADS["streamed"](folder("cohere"))


def test_a_form_that_the_bridge_cannot_hold(folder, monkeypatch):
    """TransformerLens by itself splits Falcon's grouped keys in the wrong places."""
    monkeypatch.setattr("tlspectral.models.loading.building.correct_packed", lambda adapter, config: None)
    for road, words in (("streamed", "layer 0: the bridge of "), ("loaded", "^the bridge of ")):
        with pytest.raises(UnsupportedArchitecture, match=f"{words}TransformerLens cannot hold this falcon"):
            ROADS[road](folder("falcon_grouped"))


@pytest.mark.filterwarnings("ignore:.*loses the key/value cache")  # TransformerLens 3.9 does
def test_alibi_of_falcon(folder):
    with pytest.raises(UnsupportedArchitecture, match="layer 0: Falcon with ALiBi; under eager attention"):
        tls.verify_scores(load(folder("falcon_alibi")))


def test_a_missing_layer_does_not_stop_the_others(copied):
    path = copied("gemma2")
    with_tensors(path, {"model.layers.3.self_attn.q_proj.weight": None})
    assert len(ROADS["streamed"](path, heads=["L0", "L1"])) == 8


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "num_hidden_layers", 10**12),
        ("llama", "num_hidden_layers", 90_000),
        ("llama", "hidden_size", 2**40),
        ("llama", "vocab_size", 2**40),
        ("llama", "num_attention_heads", 0),
        ("gpt2", "n_positions", 2**30),
        ("gpt2", "n_layer", -1),
    ],
)
def test_a_config_that_asks_for_terabytes_is_refused_before_they_are_allocated(copied, road, name, key, value):
    path = with_config(copied(name), **{key: value})
    start = time.perf_counter()
    with pytest.raises((BadWeights, UnsupportedArchitecture), match=r"config\.json"):
        ROADS[road](path)
    assert time.perf_counter() - start < 60


# --- numbers and types ---


@pytest.mark.parametrize("backend", ["bridge", pytest.param("hooked", marks=zoo.needs_hooked)])
def test_weights_that_are_no_numbers_are_named_in_16_bits_too(copied, backend):
    path, name = copied("llama"), "model.layers.1.self_attn.k_proj.weight"
    weight = tensors_of(path)[name]
    weight[3, 4] = torch.inf
    with_tensors(path, {name: weight})
    for dtype in ("bfloat16", "float32"):
        with pytest.raises(BadWeights, match=rf"{name} of .*: 1 of \d+ values are NaN or infinite; load the"):
            load(path, backend=backend, dtype=dtype)


def test_log_probabilities_that_are_no_numbers_are_not_blamed_on_the_bridge(copied, monkeypatch):
    whole = transformers.LlamaForCausalLM.forward

    def forward(self, *arguments, **options):
        output = whole(self, *arguments, **options)
        output.logits = output.logits * torch.nan
        return output

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(BadWeights, match="are NaN although all of its weights are numbers, in transformers' own model"):
        load(copied("llama"))


def test_a_model_that_float64_cannot_run_is_not_blamed_on_its_config(monkeypatch):
    whole = transformers.LlamaForCausalLM.forward

    def forward(self, *arguments, **options):
        if self.dtype is torch.float64:
            raise RuntimeError("a kernel without Double")
        return whole(self, *arguments, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(UnsupportedArchitecture, match=r"^LlamaForCausalLM does not run in float64 .*dtype='float32'"):
        load(llama(), dtype="float64")


@pytest.mark.parametrize("family", ["gpt_oss", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_experts_run_in_float64_whose_kernel_has_none(family, tmp_path):
    """transformers multiplies by grouped experts with a kernel of torch that has no float64."""
    config = tiny_config(family)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    tokens = zoo.prompt() % config.vocab_size
    single = load(model)(tokens)
    for given in (model, tmp_path):
        double = load(given, dtype="float64")(tokens)
        assert double.dtype is torch.float64
        # Measured: 4e-7 between float32 and float64, at logits of 1; experts that are mixed up move them by tenths.
        torch.testing.assert_close(double.float(), single, rtol=0, atol=1e-5)
