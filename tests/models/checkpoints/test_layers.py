"""A checkpoint read layer by layer gives the table of the loaded model, without the model ever being whole."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from checkpoint_folders import tensors_of, with_tensors
from safetensors import safe_open
from streamed_checkpoints import analyze, assert_streamed_equals_loaded, opened
from zoo_shapes import LLAMA_SHAPE, MORE_SHAPES, SHAPES

import tlspectral as tls
from tlspectral.errors import ScoreMismatch
from tlspectral.models.checkpoints import layers as checkpoints
from tlspectral.models.reading import bridge as reader
from tlspectral.models.running.passes import capture_until

REFUSED = ("falcon_alibi", "gemma3_with_softcap", "glm5_selecting", "hrm", "mpt_clipped")
NAMES = [name for name in (*zoo.RIGHT, *zoo.LENGTH_DEPENDENT, *MORE_SHAPES) if name not in REFUSED]
# What differs in how a layer is found: lists per layer, packed projections, norms of queries and keys. `test_families`
# does the others, with `slow` all of them.
FAST = ("gptneo", "gemma3", "falcon_grouped", "stablelm_norms")


@pytest.mark.slow
@pytest.mark.tl4
@pytest.mark.filterwarnings("ignore:.*loses the key/value cache")  # MPT, in TransformerLens 3.9
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in NAMES])
def test_the_streamed_table_is_the_loaded_one(folder, sizes, name):
    path = folder(name)
    sizes.clear()
    streamed = analyze(path)
    assert set(sizes) == {1}
    loaded = analyze(tls.load_model(path))
    assert max(sizes) > 1  # the spy sees a model that is loaded whole
    assert_streamed_equals_loaded(streamed, loaded)


# --- forms of a checkpoint ---


def tied(path):
    """The file holds one matrix for both ends."""
    config = SHAPES["gpt2"]()
    config.tie_word_embeddings, config.initializer_range = True, 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.GPT2LMHeadModel(config).save_pretrained(path)
    with safe_open(path / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118


def of_type(name, kind):
    return lambda path: zoo.hf_model(name).to(kind).save_pretrained(path)


def with_biases(path):
    """Biases that this architecture may have."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_SHAPE, attention_bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(path)
    assert tensors_of(path)["model.layers.0.self_attn.q_proj.bias"].any()


def with_two_ends_of_text(path):
    """A list as long as the model is deep, which is no list of one entry per layer."""
    model = zoo.hf_model("llama")
    model.config.eos_token_id = [2, 3]
    model.save_pretrained(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "save",
    [tied, of_type("llama", torch.bfloat16), of_type("gpt2", torch.float16), with_biases, with_two_ends_of_text],
    ids=["tied", "bfloat16", "float16", "biases", "two ends of text"],
)
def test_forms_of_a_checkpoint(tmp_path, save):
    save(tmp_path)
    assert_streamed_equals_loaded(analyze(tmp_path), analyze(tls.load_model(tmp_path)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "prefix"), [("llama", "model."), ("gpt2", "transformer.")])
def test_bare_and_longer_names(copied, name, prefix):
    """GPT-2 on the hub has no `transformer.` in front."""
    path = copied(name)
    expected = analyze(path)
    for rename in (lambda key: key.removeprefix(prefix), lambda key: f"base.{prefix}{key}"):
        with_tensors(path, rename=rename)
        pd.testing.assert_frame_equal(analyze(path), expected, check_exact=True)


# --- the kind of a layer ---


def kinds_of(path):
    """How many keys the last of 24 queries of each layer attends to, and the layer's rotary frequencies."""
    layers, found = opened(path), []
    for index in range(layers.n_layers):
        with layers.layer(index) as view:
            name, rotary = view.hook_names(0)["pattern"], view.rotary(0)
            pattern = capture_until(view, zoo.prompt(batch=1), [name], last=name)[name]
            found.append((int((pattern[0, 0, -1] > 0).sum()), None if rotary is None else rotary.theta))
    return found


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize(
    ("name", "windows", "bases"),
    [
        ("gptneo", [24, zoo.WINDOW], [None] * 2),
        ("gemma3", [zoo.WINDOW, 24] * 2, [100.0, 10000.0] * 2),
        ("mistral", [zoo.WINDOW] * 2, [10000.0] * 2),
        ("smollm3", [24] * 4, [2e6, None] * 2),
    ],
)
def test_local_layers_stay_local_and_layers_keep_their_own_base(folder, name, windows, bases):
    kinds = kinds_of(folder(name))
    assert [window for window, _ in kinds] == windows
    for (_, theta), base in zip(kinds, bases, strict=True):
        assert (theta is None) == (base is None)
        if base is not None:
            slower = 2 if (name, base) == ("gemma3", 10000.0) else 1
            expected = base ** -(np.arange(len(theta)) / len(theta)) / slower
            np.testing.assert_allclose(theta, expected, rtol=1e-6)  # float32 angles: 4e-8


# --- checks and memory ---


@pytest.mark.slow
def test_a_mismatch_names_the_layer_of_the_checkpoint(folder, monkeypatch):
    """Layer 2 of 4, though the model at hand has one."""
    scale, layer = reader._score_scale, checkpoints.WeightFiles.layer

    def opened(self, index, matrices: checkpoints.Matrices = "query-key"):
        factor = 1.5 if index == 2 else 1.0
        monkeypatch.setattr(reader, "_score_scale", lambda *arguments: factor * scale(*arguments))
        return layer(self, index, matrices)

    monkeypatch.setattr(checkpoints.WeightFiles, "layer", opened)
    with pytest.raises(ScoreMismatch, match="layer 2: the scores rebuilt"):
        analyze(folder("smollm3"))


def test_the_digest_is_that_of_what_is_read(copied):
    path = copied("llama")
    tensors = tensors_of(path)

    def digest_with(name):
        with_tensors(path, {key: value + 1e-3 if key == name else value for key, value in tensors.items()})
        layers = opened(path)
        return [layers.digest(index) for index in range(2)]

    before = digest_with("none")
    of_key, of_norm = (digest_with(f"model.layers.1.{name}.weight") for name in ("self_attn.k_proj", "input_layernorm"))
    assert before[0] == of_key[0] == of_norm[0]
    assert len({before[1], of_key[1], of_norm[1]}) == 3
    assert digest_with("model.layers.1.self_attn.v_proj.weight") == before


def test_what_is_not_read_takes_no_memory_and_layers_do_not_pile_up(folder):
    """A layer's weights are let go when its context ends, even where the view lives on."""
    with opened(folder("llama")).layer(0) as view:
        assert view.raw(0).w_q.shape == (4, zoo.WIDTH, 12)
        sizes = {
            name: parameter.untyped_storage().nbytes()
            for name, parameter in view.model.original_model.named_parameters()
            if parameter.ndim > 1 and not any(part in name for part in ("q_proj", "k_proj", "embed_tokens"))
        }
    assert len(sizes) == 6  # values, output, three of the MLP, unembedding
    assert max(sizes.values()) == 4, sizes
    assert sum(parameter.numel() for parameter in view.model.parameters()) == 0
