"""A checkpoint read layer by layer gives the table of the loaded model, without the model ever being whole."""

import functools
import json
import shutil
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
import zoo
import zoo_shapes
from safetensors import safe_open
from safetensors.torch import load, save_file

import tlspectral as tls
from tlspectral import checkpoints
from tlspectral.attention import bridge as reader
from tlspectral.errors import BadHead, ScoreMismatch, UnsupportedArchitecture

# TransformerLens 3.9 rotates the wrong pairs in Cohere's bridge.
READ_WRONG = ("cohere",) if zoo.HAS_HOOKED else ()
RIGHT = tuple(name for name in zoo.ARCHITECTURES if name not in READ_WRONG)
NOT_STREAMED = ["outside_m", "self_match", "copying", "positivity"]

_LLAMA_SHAPE = zoo_shapes._LLAMA_SHAPE


def _olmo3():
    return transformers.Olmo3Config(
        **_LLAMA_SHAPE, sliding_window=zoo.WINDOW, layer_types=["sliding_attention", "full_attention"]
    )


def _gemma3_with_eyes():
    """Its text model is nested in the config, and the vision tower has query and key projections too."""
    text = {**_LLAMA_SHAPE, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.Gemma3Config(
        text_config={**text, "sliding_window": zoo.WINDOW}, vision_config={**sizes, "image_size": 28, "patch_size": 14}
    )


MORE_SHAPES = {
    "olmo": (lambda: transformers.OlmoConfig(**_LLAMA_SHAPE), "OlmoForCausalLM"),
    "gemma": (lambda: transformers.GemmaConfig(**_LLAMA_SHAPE, head_dim=16), "GemmaForCausalLM"),
    "phi3": (lambda: transformers.Phi3Config(**_LLAMA_SHAPE), "Phi3ForCausalLM"),
    "olmo3": (_olmo3, "Olmo3ForCausalLM"),
    "olmoe": (
        lambda: transformers.OlmoeConfig(**_LLAMA_SHAPE, num_experts=4, num_experts_per_tok=2),
        "OlmoeForCausalLM",
    ),
    "gemma3_with_eyes": (_gemma3_with_eyes, "Gemma3ForConditionalGeneration"),
    "stablelm": (lambda: transformers.StableLmConfig(**_LLAMA_SHAPE), "StableLmForCausalLM"),
}
"""Architectures and forms of them that only this file needs. """
REFUSED = ("stablelm",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint folder per architecture, made when first asked for. Not to be changed: copy it."""

    @functools.cache
    def save(name):
        with mock.patch.dict(zoo_shapes.SHAPES, MORE_SHAPES):
            return zoo.save_folder(name, tmp_path_factory.mktemp("saved") / name)

    return save


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
    return tls.analyze_heads(model, **{"null_draws": 5, "detectors": False, "show_progress": False, **arguments})


def assert_streamed_equals_loaded(streamed, loaded):
    assert streamed[NOT_STREAMED].isna().all(axis=None)
    assert loaded["outside_m"].notna().all()
    assert list(streamed) == list(loaded)
    rest = [column for column in loaded if column not in (*NOT_STREAMED, "cond_eig")]
    # Most are equal to the bit; where a norm is centred, another memory layout sums in another order, and z divides
    # that by a null of 0.01: at most 3e-14 relative. A gain that is not folded moves every column by 1e-3 and more.
    pd.testing.assert_frame_equal(streamed[rest], loaded[rest], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(np.log(streamed["cond_eig"]), np.log(loaded["cond_eig"]), atol=1e-12)
    for key in ("model", "revision", "seed", "null_draws", "versions", "rotary_valid_up_to", "columns"):
        assert streamed.attrs[key] == loaded.attrs[key], key
    assert streamed.attrs["backend"] == "bridge, layer by layer"
    assert 0 < streamed.attrs["score_check"]["worst_error"] <= streamed.attrs["score_check"]["tolerance"]
    json.dumps(streamed.attrs, allow_nan=False)


@pytest.mark.parametrize(
    "name", [*RIGHT, *zoo.LENGTH_DEPENDENT, *(name for name in MORE_SHAPES if name not in REFUSED)]
)
def test_the_streamed_table_is_the_loaded_one(folder, sizes, name):
    path = folder(name)
    sizes.clear()
    streamed = analyze(path)
    assert set(sizes) == {1}
    loaded = analyze(tls.load_model(path))
    assert max(sizes) > 1 or name == "gemma3_with_eyes"  # the spy sees a model that is loaded whole
    assert_streamed_equals_loaded(streamed, loaded)


@pytest.mark.parametrize("name", READ_WRONG)
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
    make, kind = zoo_shapes.SHAPES[name]
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
    config = transformers.LlamaConfig(**_LLAMA_SHAPE, attention_bias=bias)
    with mock.patch.dict(zoo_shapes.SHAPES, {"llama": (lambda: config, "LlamaForCausalLM")}):
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


# --- layers keep their kind ---


def theta_of(layers, index):
    with layers.layer(index) as view:
        rotary = view.rotary(0)
        return None if rotary is None else rotary.theta


def opened(path):
    source = checkpoints.streamable_checkpoint(path)
    assert source is not None
    return checkpoints.CheckpointLayers(source)


def window_of(layers, index):
    """How many keys the last of 24 queries attends to."""
    seen = []
    with layers.layer(index) as view:
        name = view.hook_names(0)["pattern"]
        view.run(
            zoo.prompt(batch=1), [(name, lambda pattern, hook: seen.append((pattern[0, 0, -1] > 0).sum()))], last=name
        )
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
    real = checkpoints.CheckpointLayers.layer
    monkeypatch.setattr(
        checkpoints.CheckpointLayers, "layer", lambda self, index: (read.append(index), real(self, index))[1]
    )
    part = analyze(folder("gemma2"), layers=layers)
    assert read == sorted(layers)
    whole = analyze(folder("gemma2"))
    expected = whole[whole["layer"].isin(layers)].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        part.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"), check_exact=True
    )


def test_layers_that_do_not_exist_are_refused(folder):
    with pytest.raises(BadHead, match="the model has layers 0 to 1"):
        analyze(folder("llama"), layers=[2])


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_position_share_needs_no_run(folder, name):
    extras = {"extras": ["position_share"]}
    streamed, loaded = analyze(folder(name), **extras), analyze(tls.load_model(folder(name)), **extras)
    assert streamed["position_share"].notna().all() == (name != "llama")
    np.testing.assert_allclose(streamed["position_share"], loaded["position_share"], rtol=1e-12)


@pytest.mark.parametrize("arguments", [{"extras": ["score_asym"]}, {"tokens": torch.arange(3, 20)}])
def test_activations_need_the_model(folder, sizes, arguments):
    path = folder("llama")
    sizes.clear()
    with pytest.raises(ValueError, match="needs the model's activations"):
        analyze(path, **arguments)
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


# --- what is read ---


def test_nothing_but_queries_keys_and_norms_is_read(copied):
    """The rest of the file may be missing or broken."""
    path = copied("llama")
    expected = analyze(path)
    tensors = load((path / "model.safetensors").read_bytes())
    kept = {
        name: value for name, value in tensors.items() if any(part in name for part in ("q_proj", "k_proj", "norm"))
    }
    kept["model.layers.1.mlp.up_proj.weight"] = torch.full_like(tensors["model.layers.1.mlp.up_proj.weight"], torch.nan)
    assert len(kept) < len(tensors) / 2
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    pd.testing.assert_frame_equal(analyze(path), expected, check_exact=True)


def test_the_digest_is_that_of_what_is_read(copied):
    path = copied("llama")
    tensors = load((path / "model.safetensors").read_bytes())

    def digest_with(name):
        changed = {key: value + 1e-3 if key == name else value for key, value in tensors.items()}
        save_file(changed, path / "model.safetensors", {"format": "pt"})
        return analyze(path).attrs["weights_sha256"]

    before = digest_with("none")
    assert digest_with("model.layers.1.self_attn.k_proj.weight") != before
    assert digest_with("model.layers.0.input_layernorm.weight") != before
    assert digest_with("model.layers.1.self_attn.v_proj.weight") == before


def test_layers_do_not_pile_up(folder):
    """A layer's weights are let go when its context ends, even where the view lives on."""
    layers = opened(folder("gemma2"))
    with layers.layer(0) as view:
        assert view.raw(0).w_q.shape == (4, zoo.WIDTH, 16)
    assert sum(parameter.numel() for parameter in view.model.parameters()) == 0


def test_what_is_not_read_takes_no_memory(folder):
    with opened(folder("llama")).layer(0) as view:
        sizes = {
            name: parameter.untyped_storage().nbytes()
            for name, parameter in view.model.original_model.named_parameters()
            if parameter.ndim > 1 and not any(part in name for part in ("q_proj", "k_proj", "embed_tokens"))
        }
    assert len(sizes) == 6  # values, output, three of the MLP, unembedding
    assert max(sizes.values()) == 4, sizes


# --- composition ---


@pytest.mark.parametrize("kind", ["k", "q", "v"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "phi3", "gptneo"])
def test_composition_from_files(folder, sizes, name, kind):
    path, target = folder(name), (1, 2)
    sizes.clear()
    streamed = tls.k_composition(str(path), target, kind=kind)
    assert set(sizes) == {1}
    loaded = tls.k_composition(tls.load_model(path), target, kind=kind)
    pd.testing.assert_frame_equal(streamed, loaded, rtol=1e-12, atol=0)


def test_composition_reads_values_and_outputs_of_earlier_layers_only(folder, monkeypatch):
    read = []
    real = checkpoints.CheckpointLayers.layer
    monkeypatch.setattr(
        checkpoints.CheckpointLayers,
        "layer",
        lambda self, index, side: (read.append((index, side)), real(self, index, side))[1],
    )
    assert len(tls.k_composition(folder("gemma2"), (2, 0))) == 8
    assert read == [(2, "query-key"), (0, "output"), (1, "output")]


@pytest.mark.parametrize("target", [(2, 0), (1, 4), (-1, 0), (1, -1)])
def test_composition_of_heads_that_are_not_there(folder, target):
    with pytest.raises(BadHead, match="does not exist: the model has layers 0 to 1"):
        tls.k_composition(folder("llama"), target)


# --- architectures that are refused ---


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_architectures_without_the_operator_are_refused(folder, name):
    with pytest.raises(UnsupportedArchitecture):
        analyze(folder(name))


def test_a_refusal_says_which_tensors_there_are(folder):
    with pytest.raises(UnsupportedArchitecture) as refused:
        analyze(folder("mamba"))
    assert "its model type is mamba" in str(refused.value)
    assert "backbone.layers.N.mixer.x_proj.weight" in str(refused.value)
    with pytest.raises(
        UnsupportedArchitecture, match=r"stablelm.*model\.layers\.N\.self_attn\.q_proj\.weight.*pass a loaded"
    ):
        analyze(folder("stablelm"))


def test_a_form_that_the_bridge_cannot_hold_is_refused(folder, monkeypatch):
    """TransformerLens by itself splits Falcon's grouped keys in the wrong places."""
    monkeypatch.setattr(tls.loading, "correct_falcon", lambda adapter, config: None)
    with pytest.raises(UnsupportedArchitecture, match="layer 0: the bridge of TransformerLens cannot hold this falcon"):
        analyze(folder("falcon_grouped"))
    with pytest.raises(UnsupportedArchitecture, match=r"^the bridge of TransformerLens cannot hold this falcon"):
        tls.load_model(folder("falcon_grouped"))


def test_code_from_a_checkpoint_is_never_run(copied):
    path = copied("llama")
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text("raise SystemExit('run')\n")
    with pytest.raises(UnsupportedArchitecture, match=r"config\.json is not understood.*model\.layers\.N\.self_attn"):
        analyze(path)


def test_the_streamed_files_are_left_alone(folder):
    path = folder("llama")
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    analyze(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
