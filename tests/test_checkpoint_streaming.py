"""A checkpoint read layer by layer gives the table of the loaded model, without the model ever being whole."""

from unittest import mock

import pandas as pd
import pytest
import torch
import transformers
import zoo
from safetensors import safe_open
from safetensors.torch import load, save_file
from streamed_checkpoints import analyze, assert_streamed_equals_loaded
from zoo_shapes import LLAMA_SHAPE, MORE_SHAPES, SHAPES

import tlspectral as tls
from tlspectral.errors import ScoreMismatch
from tlspectral.models import checkpoints
from tlspectral.models.attention import bridge as reader

REFUSED = ("falcon_alibi", "gemma3_with_softcap", "mpt_clipped")


@pytest.mark.parametrize(
    "name", [*zoo.RIGHT, *zoo.LENGTH_DEPENDENT, *(name for name in MORE_SHAPES if name not in REFUSED)]
)
def test_the_streamed_table_is_the_loaded_one(folder, sizes, name):
    path = folder(name)
    sizes.clear()
    streamed = analyze(path)
    assert set(sizes) == {1}
    loaded = analyze(tls.load_model(path))
    assert max(sizes) > 1 or name == "gemma3_with_eyes"  # the spy sees a model that is loaded whole
    assert_streamed_equals_loaded(streamed, loaded)


@pytest.mark.parametrize("name", zoo.READ_WRONG)
def test_a_streamed_model_is_checked_too(folder, name):
    with pytest.raises(ScoreMismatch, match="no table is returned"):
        analyze(folder(name))


@pytest.fixture
def wrong_at(monkeypatch):
    """Score scales that are read wrong in one layer of a checkpoint."""

    def at(wrong):
        scale, layer = reader._score_scale, checkpoints.CheckpointLayers.layer

        def opened(self, index, side: checkpoints.Side = "query-key"):
            factor = 1.5 if index == wrong else 1.0
            monkeypatch.setattr(reader, "_score_scale", lambda *arguments: factor * scale(*arguments))
            return layer(self, index, side)

        monkeypatch.setattr(checkpoints.CheckpointLayers, "layer", opened)

    return at


def test_a_mismatch_names_the_layer_of_the_checkpoint(folder, wrong_at):
    """Layer 2 of 4, though the model at hand has one."""
    wrong_at(2)
    with pytest.raises(ScoreMismatch, match="layer 2: the scores rebuilt"):
        analyze(folder("smollm3"))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_tied_unembedding(tmp_path, name):
    """The file holds one matrix for both ends."""
    make, kind = SHAPES[name]
    config = make()
    config.tie_word_embeddings = True
    config.initializer_range = 0.2
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        getattr(transformers, kind)(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as tensors:
        assert "lm_head.weight" not in tensors.keys()  # noqa: SIM118
    assert_streamed_equals_loaded(analyze(tmp_path), analyze(tls.load_model(tmp_path)))


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", torch.bfloat16), ("gpt2", torch.float16), ("neox", torch.bfloat16)]
)
def test_a_half_precision_checkpoint(tmp_path, name, kind):
    zoo.hf_model(name).to(kind).save_pretrained(tmp_path)
    assert_streamed_equals_loaded(analyze(tmp_path), analyze(tls.load_model(tmp_path)))


@pytest.mark.parametrize("bias", [False, True])
def test_biases_that_an_architecture_may_have(tmp_path, bias):
    config = transformers.LlamaConfig(**LLAMA_SHAPE, attention_bias=bias)
    with mock.patch.dict(SHAPES, {"llama": (lambda: config, "LlamaForCausalLM")}):
        path = zoo.save_folder("llama", tmp_path)
    assert ("model.layers.0.self_attn.q_proj.bias" in load((path / "model.safetensors").read_bytes())) == bias
    assert_streamed_equals_loaded(analyze(path), analyze(tls.load_model(path)))


@pytest.mark.parametrize(("name", "prefix"), [("llama", "model."), ("gpt2", "transformer."), ("neox", "gpt_neox.")])
def test_bare_and_longer_names(copied, name, prefix):
    """GPT-2 on the hub has no `transformer.` in front."""
    path = copied(name)
    expected = analyze(path)
    tensors = load((path / "model.safetensors").read_bytes())
    for rename in (lambda key: key.removeprefix(prefix), lambda key: f"base.{key}"):
        save_file({rename(key): value for key, value in tensors.items()}, path / "model.safetensors", {"format": "pt"})
        pd.testing.assert_frame_equal(analyze(path), expected, check_exact=True)
