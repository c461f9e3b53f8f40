"""Saves of a SpectralHookedTransformer: options of load_model, damaged and foreign files, other functions on them."""

import json
import random
import shutil

import pytest
import torch
import transformers
import zoo
from command_line import run
from damaged_files import other_bytes, other_json, outcome
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from spectral_zoo import base, config, logits, move

import tlspectral as tls
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.spectral_rope import SpectralHookedTransformer, load_spectral, merge, to_spectral
from tlspectral.spectral_rope.spectral_file import write_file

WEIGHTS, CONFIG = "model.safetensors", "spectral_config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and the folder of its save, which no test changes."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    model = move(SpectralHookedTransformer(config())).eval()
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[1], tmp_path / "run")


@pytest.mark.skipif(zoo.HAS_HOOKED, reason="TransformerLens 3 loads it")
@pytest.mark.parametrize("backend", ["auto", "bridge"])
def test_on_transformer_lens_4_the_error_is_that_of_the_class(tmp_path, backend):
    write_file(tmp_path / WEIGHTS, tmp_path, {"w": torch.zeros(1)}, {"hooked_transformer": {}}, {})
    with pytest.raises(ImportError) as of_class:
        SpectralHookedTransformer(config())
    with pytest.raises(ImportError) as error:
        tls.load_model(tmp_path, backend=backend)
    assert str(error.value) == f"{tmp_path} holds a SpectralHookedTransformer. {of_class.value}"


# --- options ---


@zoo.needs_hooked
@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_a_type_is_of_the_weights(saved, dtype):
    model, folder = saved
    loaded = tls.load_model(folder, dtype=dtype, device="cpu", backend="hooked")
    wanted = torch.float64 if dtype is torch.float64 else torch.bfloat16
    assert loaded.cfg.dtype == wanted
    for name, value in loaded.named_parameters():
        # At least float32: in 16 bits an optimizer's step rounds to no change of a frequency.
        assert value.dtype == (torch.promote_types(wanted, torch.float32) if "spectral" in name else wanted)
    found, expected = (logits(each).double().log_softmax(-1) for each in (loaded, model))
    # In the mean, rounding is 1.2e-6 from float64 and 0.033 from bfloat16, the learned rotations are 1.6.
    assert float((found - expected).abs().mean()) < (1e-5 if wanted is torch.float64 else 0.15)


@zoo.needs_hooked
def test_options_that_do_not_fit_are_refused(saved):
    _, folder = saved
    with pytest.raises(ValueError, match=r"run holds a SpectralHookedTransformer, which has no bridge"):
        tls.load_model(folder, backend="bridge")
    with pytest.raises(ValueError, match="local folder, which has no revision='main'"):
        tls.load_model(folder, revision="main")
    with pytest.raises(ValueError, match="'files'"):
        tls.load_model(folder, weights="files")
    with pytest.raises(ValueError, match="cannot be used here"):
        tls.load_model(folder, device="cuda:99")
    assert tls.load_model(saved[0]) is saved[0]


@zoo.needs_hooked
def test_a_training_step_is_a_subfolder(saved, tmp_path):
    model, folder = saved
    shutil.copytree(folder, tmp_path / "step4")
    loaded = tls.load_model(tmp_path, checkpoint=4)
    assert loaded.tlspectral_source == {"model": str(tmp_path), "revision": "step4"}
    assert torch.equal(logits(loaded), logits(model))


@zoo.needs_hooked
def test_a_tokenizer_of_the_callers_is_used_and_left_as_it_is(saved, tmp_path):
    zoo.save_folder("llama", tmp_path / "other", tokenizer=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "other")
    before = tokenizer.name_or_path, tokenizer.init_kwargs.copy()
    loaded = tls.load_model(saved[1], tokenizer=tokenizer)
    assert loaded.to_tokens("w3 w4")[0, -2:].tolist() == [3, 4]
    assert loaded.tokenizer is not tokenizer
    assert (tokenizer.name_or_path, tokenizer.init_kwargs) == before


@pytest.mark.slow
@zoo.needs_hooked
def test_the_command_line_analyses_it(saved):
    _, folder = saved
    for options in ([], ["--no-detectors"]):
        result = run("analyze", folder, "--null-draws", "4", *options)
        assert result.exit_code == 0, result.output
        assert "8 heads" in result.output


# --- damaged and foreign files ---


def rewritten(folder, change, metadata=None):
    """The file of weights with other tensors or metadata, as another program would write it."""
    path = folder / WEIGHTS
    with safe_open(path, framework="pt") as file:
        held = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={**held, **(metadata or {})})


def config_with(folder, **changes):
    path = folder / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def scaled(name, factor):
    return lambda tensors: tensors[name].mul_(factor)


DAMAGED = {
    "cut": (cut, rf"{WEIGHTS} is not a safetensors file"),
    "no safetensors": (lambda at: (at / WEIGHTS).write_bytes(b"nonsense"), rf"{WEIGHTS} is not a safetensors file"),
    "foreign": (
        lambda at: save_file({"w": torch.zeros(1)}, at / WEIGHTS), rf"{WEIGHTS} is not a saved .*format None",
    ),
    "missing": (lambda at: rewritten(at, lambda held: held.pop("embed.W_E")), rf"{WEIGHTS} does not hold what was"),
    "extra": (lambda at: rewritten(at, lambda held: held.update(x=torch.ones(1))), "does not hold what was saved"),
    "another weight": (lambda at: rewritten(at, scaled("blocks.0.mlp.W_in", 1.0001)), "does not hold what was saved"),
    "another gain": (lambda at: rewritten(at, scaled("spectral.1.gain", 1.0001)), "does not hold what was saved"),
    "another mask": (
        lambda at: rewritten(at, lambda held: held["spectral.0.query_mask"].logical_not_()), "does not hold what was",
    ),
    "not finite": (
        lambda at: rewritten(at, lambda held: held["spectral.1.omega"].fill_(torch.inf)),
        rf"{WEIGHTS}: spectral.1.omega has values that are not finite",
    ),
    "another record": (lambda at: rewritten(at, lambda held: None, {"spectral": "{}"}), "not hold what was saved"),
    "another identity": (lambda at: rewritten(at, lambda held: held["base"].add_(1)), "does not hold what was saved"),
    "weights of an earlier version": (
        lambda at: rewritten(at, lambda held: None, {"format": "tlspectral.spectral_hooked_transformer.1"}),
        rf"{WEIGHTS} was saved by an earlier version of tlspectral \(format .*1'",
    ),
    "config of another version": (
        lambda at: config_with(at, format="tlspectral.spectral_rope.7"),
        rf"{CONFIG} was saved by a newer version of tlspectral .*: upgrade tlspectral",
    ),
    "config of something else": (lambda at: config_with(at, format="x"), rf"{CONFIG} is not a saved"),
    "config is no JSON": (lambda at: (at / CONFIG).write_text("{"), rf"{CONFIG} is not a config of a spectral model"),
    "config is a list": (lambda at: (at / CONFIG).write_text("[]"), rf"{CONFIG} is not a config of a spectral model"),
}  # fmt: skip


@zoo.needs_hooked
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_or_foreign_file_is_refused_by_name(folder, what):
    change, said = DAMAGED[what]
    change(folder)
    with pytest.raises(IncompatibleCheckpoint, match=said):
        tls.load_model(folder)


@zoo.needs_hooked
def test_a_folder_without_its_weights_says_so(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match=f"holds {CONFIG} and no {WEIGHTS}"):
        tls.load_model(folder)


@zoo.needs_hooked
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "change", "least"), [(WEIGHTS, other_bytes, 20), (CONFIG, other_json, 5), ("head", other_bytes, 20)]
)
def test_no_damage_gives_another_model_or_a_raw_error(saved, folder, file, change, least):
    """In the head of the file of weights are names, shapes and metadata."""
    model, whole = saved
    path, draws, refused = folder / (WEIGHTS if file == "head" else file), random.Random(0), 0
    content, expected = (whole / path.name).read_bytes(), logits(model)
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(40):
        path.write_bytes(change(content, draws, **({"within": end} if file == "head" else {})))
        found = outcome(tls.load_model, folder, path)
        refused += isinstance(found, str)
        assert isinstance(found, str) or torch.equal(logits(found), expected)
    assert refused > least  # some damage is none: spaces, or what a load does not read


@zoo.needs_hooked
def test_a_function_that_was_replaced_by_hand_is_seen(tmp_path):
    model = SpectralHookedTransformer(config()).eval()
    model.blocks[0].mlp.act_fn = torch.relu
    model.save_pretrained(tmp_path)
    with pytest.raises(
        IncompatibleCheckpoint, match=rf"{WEIGHTS} belongs to another model: log-prob.* that was replaced by hand"
    ):
        tls.load_model(tmp_path)


@zoo.needs_hooked
def test_a_field_that_this_version_does_not_know_is_named(tmp_path, monkeypatch):
    from tlspectral.spectral_rope import spectral_hooked_transformer as saving

    own = saving._as_json
    monkeypatch.setattr(saving, "_as_json", lambda cfg: {**own(cfg), "of_a_newer_version": 1})
    monkeypatch.setattr(saving, "_require_makeable", lambda *given: None)
    SpectralHookedTransformer(config()).save_pretrained(tmp_path)
    monkeypatch.undo()
    with pytest.raises(tls.errors.BadWeights, match=rf"{WEIGHTS} describes no model .*of_a_newer_version"):
        tls.load_model(tmp_path)


# --- other functions on such a folder, and on what it holds ---


@zoo.needs_hooked
def test_load_spectral_says_how_it_is_loaded(saved):
    _, folder = saved
    for path in (folder, folder / WEIGHTS):
        with pytest.raises(IncompatibleCheckpoint, match=r"holds a whole SpectralHookedTransformer.* load it by load_"):
            load_spectral(base("hooked", "llama"), path)


@zoo.needs_hooked
def test_what_was_loaded_merges_and_is_spectral_already(saved, tmp_path):
    _, folder = saved
    loaded = tls.load_model(folder)
    with pytest.raises(ValueError, match="spectral already: train it as it is"):
        to_spectral(loaded)
    with pytest.raises(ValueError, match=r"omega has moved .* or keep the model with save_pretrained"):
        merge(loaded)
    move(SpectralHookedTransformer(config()), only=("phase", "gain")).save_pretrained(tmp_path)
    still = tls.load_model(tmp_path)
    # Rounding of W_Q, 2e-6.
    torch.testing.assert_close(logits(merge(still)), logits(still), rtol=0, atol=5e-5)
