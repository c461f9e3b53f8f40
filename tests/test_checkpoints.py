"""A checkpoint read layer by layer gives the table of the loaded model, without the model ever being whole."""

import functools
import json
import shutil

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tlspectral as tls
from tlspectral import checkpoints
from tlspectral.errors import BadHead, BadWeights, ScoreMismatch, UnsupportedArchitecture

# TransformerLens 3.9 rotates the wrong pairs in Cohere's bridge.
READ_WRONG = ("cohere",) if zoo.HAS_HOOKED else ()
RIGHT = tuple(name for name in zoo.ARCHITECTURES if name not in READ_WRONG)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint folder per architecture, made when first asked for. Not to be changed: copy it."""
    return functools.cache(lambda name: zoo.save_folder(name, tmp_path_factory.mktemp("saved") / name))


@pytest.fixture
def copied(folder, tmp_path):
    """A checkpoint folder of one's own."""

    def copy(name):
        return shutil.copytree(folder(name), tmp_path / f"{name}-copy")

    return copy


@pytest.fixture
def sizes(monkeypatch):
    """Layers of every causal language model that transformers instantiates."""
    built = []
    real = transformers.PreTrainedModel.__init__

    def spy(self, config, *arguments, **options):
        if type(self).__name__.endswith(("ForCausalLM", "LMHeadModel")):
            built.append(config.num_hidden_layers)
        real(self, config, *arguments, **options)

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", spy)
    return built


def analyze(model, **arguments):
    return tls.analyze_heads(model, **{"null_draws": 20, "detectors": False, "show_progress": False, **arguments})


def assert_streamed_equals_loaded(streamed, loaded):
    assert streamed["outside_m"].isna().all()
    assert loaded["outside_m"].notna().all()
    rest = [column for column in loaded if column != "outside_m"]
    assert list(streamed) == list(loaded)
    pd.testing.assert_frame_equal(streamed[rest], loaded[rest], check_exact=True)
    for key in (
        "model",
        "revision",
        "weights_sha256",
        "seed",
        "null_draws",
        "versions",
        "rotary_valid_up_to",
        "columns",
    ):
        assert streamed.attrs[key] == loaded.attrs[key], key
    assert streamed.attrs["backend"] == "bridge, layer by layer"
    json.dumps(streamed.attrs, allow_nan=False)


@pytest.mark.parametrize("name", RIGHT + zoo.LENGTH_DEPENDENT)
def test_the_streamed_table_is_the_loaded_one(folder, sizes, name):
    path = folder(name)
    sizes.clear()
    streamed = analyze(path)
    assert set(sizes) == {1}
    loaded = analyze(tls.load_model(path))
    assert max(sizes) > 1  # the spy sees a model that is loaded whole
    assert_streamed_equals_loaded(streamed, loaded)


@pytest.mark.parametrize("name", READ_WRONG)
def test_a_streamed_model_is_checked_too(folder, name):
    with pytest.raises(ScoreMismatch, match="no table is returned"):
        analyze(folder(name))


def test_a_mismatch_names_the_layer_of_the_checkpoint(folder, monkeypatch):
    """Layer 2 of 4, though the model at hand has one."""
    from tlspectral.attention import bridge as reader

    real, real_view = reader._score_scale, checkpoints.CheckpointLayers.layer_view

    def layer_view(self, index):
        factor = 1.5 if index == 2 else 1.0
        monkeypatch.setattr(reader, "_score_scale", lambda *arguments: factor * real(*arguments))
        return real_view(self, index)

    monkeypatch.setattr(checkpoints.CheckpointLayers, "layer_view", layer_view)
    with pytest.raises(ScoreMismatch, match="layer 2: the scores rebuilt"):
        analyze(folder("smollm3"))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_a_sharded_checkpoint(folder, tmp_path, sizes, name):
    zoo.hf_model(name).save_pretrained(tmp_path, max_shard_size="40KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    sizes.clear()
    streamed = analyze(tmp_path)
    assert set(sizes) == {1}
    assert_streamed_equals_loaded(streamed, analyze(tls.load_model(tmp_path)))


def test_shards_without_an_index(folder, tmp_path):
    """Each file says itself what it holds."""
    zoo.hf_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    rest = analyze(tmp_path).drop(columns="outside_m")
    pd.testing.assert_frame_equal(rest, analyze(folder("llama")).drop(columns="outside_m"), check_exact=True)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_tied_unembedding(tmp_path, name):
    """The file holds one matrix for both ends."""
    from zoo_shapes import SHAPES

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


def test_a_half_precision_checkpoint(tmp_path):
    zoo.hf_model("llama").bfloat16().save_pretrained(tmp_path)
    assert_streamed_equals_loaded(analyze(tmp_path), analyze(tls.load_model(tmp_path)))


# --- layers keep their kind ---


def theta_of(layers, index):
    rotary = layers.layer_view(index).layer(0).rotary
    return None if rotary is None else rotary.theta


def opened(path):
    return checkpoints.CheckpointLayers(checkpoints.streamable_checkpoint(path))


def window_of(layers, index):
    """How many keys the last of 24 queries attends to."""
    view, seen = layers.layer_view(index), []
    name = view.hook_names(0)["pattern"]
    view.run(zoo.prompt(batch=1), [(name, lambda pattern, hook: seen.append((pattern[0, 0, -1] > 0).sum()))], last=name)
    return int(seen[0])


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("gptneo", [24, zoo.WINDOW]),
        ("gemma2", [zoo.WINDOW, 24] * 2),
        ("gemma3", [zoo.WINDOW, 24] * 2),
        ("mistral", [zoo.WINDOW] * 2),
        ("llama", [24, 24]),
    ],
)
def test_local_layers_stay_local(folder, name, windows):
    layers = opened(folder(name))
    assert [window_of(layers, index) for index in range(layers.n_layers)] == windows


def test_layers_without_rotary_positions_stay_so(folder):
    layers = opened(folder("smollm3"))
    assert [theta_of(layers, index) is None for index in range(4)] == [False, True, False, True]
    table = analyze(folder("smollm3"))
    assert table["rope_imag_frac"].isna().tolist() == ([False] * 4 + [True] * 4) * 2


def test_layers_keep_their_own_base(folder):
    layers, pairs = opened(folder("gemma3")), np.arange(8)
    for index in range(4):
        expected = 10000.0 ** (-pairs / 8) / 2 if index % 2 else 100.0 ** (-pairs / 8)
        np.testing.assert_allclose(theta_of(layers, index), expected, rtol=1e-6)  # float32 angles: 4e-8


def test_a_list_of_another_meaning_is_not_taken_for_one_per_layer(tmp_path):
    """Two end-of-text ids in a model of two layers."""
    model = zoo.hf_model("llama")
    model.config.eos_token_id = [2, 3]
    model.save_pretrained(tmp_path)
    assert_streamed_equals_loaded(analyze(tmp_path), analyze(tls.load_model(tmp_path)))


# --- arguments ---


@pytest.mark.parametrize("layers", [[1], [3, 0]])
def test_some_layers_only(folder, monkeypatch, layers):
    read = []
    real = checkpoints.CheckpointLayers.layer_view
    monkeypatch.setattr(
        checkpoints.CheckpointLayers, "layer_view", lambda self, index: (read.append(index), real(self, index))[1]
    )
    part = analyze(folder("gemma2"), layers=layers)
    assert set(read) == {0, *layers}  # layer 0 comes with the embeddings
    whole = analyze(folder("gemma2"))
    expected = whole[whole["layer"].isin(layers)].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        part.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"), check_exact=True
    )


def test_layers_that_do_not_exist_are_refused(folder):
    with pytest.raises(BadHead, match="the model has layers 0 to 1"):
        analyze(folder("llama"), layers=[2])


def test_position_share_needs_no_run(folder):
    extras = {"extras": ["position_share"]}
    streamed, loaded = analyze(folder("gpt2"), **extras), analyze(tls.load_model(folder("gpt2")), **extras)
    assert streamed["position_share"].notna().all()
    assert streamed["position_share"].equals(loaded["position_share"])


def test_score_asymmetry_needs_the_model(folder, sizes):
    path = folder("llama")
    sizes.clear()
    with pytest.raises(ValueError, match="score_asym needs"):
        analyze(path, extras=["score_asym"])
    assert not sizes  # said before any work


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_with_detectors_the_model_is_loaded(folder, sizes, kind):
    path = kind(folder("llama"))
    sizes.clear()
    table = analyze(path, detectors=True)
    assert set(sizes) == {2}
    assert table.attrs["backend"] == "bridge"
    assert table[["prev", "outside_m"]].notna().all(axis=None)


def test_the_bar_is_silent_when_off(folder, capfd):
    capfd.readouterr()
    analyze(folder("llama"))
    assert capfd.readouterr() == ("", "")


# --- other folders ---


def test_a_folder_of_pytorch_weights_is_loaded(copied, sizes):
    path = copied("llama")
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    sizes.clear()
    table = analyze(path)
    assert set(sizes) == {2}
    assert table.attrs["backend"] == "bridge"
    assert table["outside_m"].notna().all()


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ("model.layers.1.self_attn.q_proj.weight", r"layer 1: .*lacks 1 of its weights.* such as .*q_proj\.weight"),
        ("model.layers.1.mlp.up_proj.weight", r"layer 1: .*lacks 1 of its weights.* such as .*up_proj\.weight"),
        ("model.embed_tokens.weight", r"lacks 1 of its weights.* such as .*embed_tokens\.weight"),
        ("lm_head.weight", r"lacks 1 of its weights.* such as .*lm_head\.weight"),
    ],
)
def test_missing_tensors_are_named(copied, tensor, said):
    path = copied("llama")
    tensors = load_file(path / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadWeights, match=said):
        analyze(path)


@pytest.mark.parametrize("damage", ["short", "wide"])
def test_tensors_of_another_shape_are_bad_weights(copied, damage):
    path = copied("llama")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:12].clone() if damage == "short" else tensors[name].repeat(2, 1)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadWeights, match=r"layer 1: .*k_proj"):
        analyze(path)


def test_a_layer_that_is_not_there_is_refused(copied):
    path = copied("llama")
    tensors = {name: value for name, value in load_file(path / "model.safetensors").items() if ".layers.1." not in name}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises((BadWeights, UnsupportedArchitecture), match="layer 1"):
        analyze(path)


def test_a_shard_that_is_not_there_is_bad_weights(tmp_path):
    zoo.hf_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    sorted(tmp_path.glob("*.safetensors"))[-1].unlink()
    with pytest.raises(BadWeights, match=r"safetensors"):
        analyze(tmp_path)


def test_a_cut_off_file_is_bad_weights(copied):
    path = copied("llama") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(BadWeights, match=r"cannot be read|damaged|incomplete"):
        analyze(path.parent)


def test_weights_that_are_no_numbers_are_refused_by_layer_and_role(copied):
    path = copied("llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"][3, 4] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadWeights, match="layer 1, W_K: 1 of"):
        analyze(path)


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_architectures_without_the_operator_are_refused(folder, name):
    with pytest.raises(UnsupportedArchitecture):
        analyze(folder(name))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        analyze(tmp_path)


def test_the_streamed_files_are_left_alone(folder):
    path = folder("llama")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    analyze(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
