"""The packaged checkpoints: what their files say, and that they load as what was trained."""

import hashlib
import importlib.resources
import shutil

import pandas as pd
import pytest
import torch
import zoo
from packaged import BACKENDS, CONSTRAINED, analyzed, detected, loaded, sequences, trained

import tlspectral as tls
from tlspectral.errors import BadWeights
from tlspectral.models.loading.packaged import models_folder, read_packaged
from tlspectral.models.loading.source import PACKAGED, TINY, find_source
from tlspectral.studies.common import RandomMapTask, TransformerConfig, evaluate
from tlspectral.studies.fingerprint.packaged_models import RECIPES

every_model = pytest.mark.parametrize("name", TINY)
every_backend = pytest.mark.parametrize("backend", BACKENDS)
pytestmark = pytest.mark.usefixtures("no_network")


# --- the files ---


def test_there_is_a_recipe_for_every_packaged_model_and_no_other_file():
    assert models_folder() == importlib.resources.files("tlspectral") / "data" / "models"
    assert tuple(sorted(RECIPES)) == TINY
    sizes = {file.name: file.stat().st_size for file in models_folder().iterdir()}
    assert sizes.keys() == {f"{name}.{ending}" for name in TINY for ending in ("json", "safetensors")}
    assert 1000 < min(sizes.values()) < max(sizes.values()) < 200_000


@every_model
def test_the_record_says_how_the_weights_were_made_and_what_they_do(name):
    record, weights = read_packaged(name)
    recipe = RECIPES[name]
    assert record["sha256"] == hashlib.sha256((models_folder() / f"{name}.safetensors").read_bytes()).hexdigest()
    assert record["command"] == f"python -m tlspectral.studies.fingerprint.packaged_models {name}"
    assert (record["task"], record["training"]) == (vars(recipe.task), vars(recipe.training))
    assert TransformerConfig(**record["config"]) == recipe.config
    assert {"torch", "tlspectral", "python", "transformer-lens"} <= set(record["versions"])
    assert weights["blocks.0.attn.W_Q"].shape == (4, 64, 16)
    # The metrics, measured again; another build of torch rounds otherwise.
    metrics = record["metrics"]
    for metric, value in evaluate(trained(name), RandomMapTask().sample(64, torch.Generator().manual_seed(99))).items():
        assert metrics[metric] == pytest.approx(value, abs=1e-4)
    heads = pd.DataFrame(metrics["heads"])
    pd.testing.assert_frame_equal(heads, detected(name)[list(heads)], rtol=0, atol=1e-4)
    assert ("penalty" in record) == (name in CONSTRAINED)
    if name in CONSTRAINED:
        assert record["penalty"] == {"name": recipe.penalty.__name__, "weight": 10.0}
        assert metrics["penalty"] == pytest.approx(recipe.penalty(trained(name)).item(), abs=1e-5)
        spectra = pd.DataFrame(metrics["spectra"])
        pd.testing.assert_frame_equal(spectra, analyzed(name)[list(spectra)], rtol=0, atol=1e-4)


@pytest.mark.parametrize("place", [0, -1])
def test_changed_weights_are_refused(tmp_path, monkeypatch, place):
    folder = shutil.copytree(models_folder(), tmp_path / "models")
    read_packaged("tiny-rope", folder)
    file = folder / "tiny-rope.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    monkeypatch.setattr("tlspectral.models.loading.packaged.models_folder", lambda: folder)
    with pytest.raises(BadWeights, match=r"not the file that tiny-rope\.json describes.*packaged_models tiny-rope"):
        tls.load_model("tiny-rope")


# --- loading ---


@every_backend
@every_model
def test_a_loaded_model_is_the_trained_one_and_ready(name, backend):
    tokens, model = sequences().tokens, loaded(name, backend)
    with torch.no_grad():
        expected, found = trained(name)(tokens), model(tokens)
    # Measured: at most 1.1e-5 in logits of up to 6 (rounding in float32; see the next test).
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=2e-5, rtol=0)
    digest = read_packaged(name)[0]["sha256"]
    assert model.tlspectral_source == {"model": name, "revision": digest[:12], "sha256": digest}
    assert model.cfg.model_name == name
    assert (model.cfg.d_vocab, model.cfg.n_ctx, model.tokenizer) == (32, 128, None)
    assert not any(module.training for module in model.modules())


@every_backend
@pytest.mark.parametrize("name", ["tiny-ape", "tiny-rope"])
def test_logits_in_float64(name, backend):
    """Where rounding is out of the way, no small difference of the architectures can hide in it."""
    tokens = sequences().tokens
    model = tls.load_model(name, backend=backend, dtype="float64")
    plain = trained(name).double()
    if backend == "hooked" and "rope" in name:
        # It computes its angles in float64, the others in float32: 4e-6 radians apart at the last position.
        for block in plain.blocks:
            theta = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
            angle = torch.outer(torch.arange(128, dtype=torch.float64), theta)
            block.attn.cos, block.attn.sin = angle.cos(), angle.sin()
    with torch.no_grad():
        # Measured: 1e-14 on the bridge; 1.1e-6 hooked, since TransformerLens folds norms in float32.
        torch.testing.assert_close(model(tokens), plain(tokens), atol=1e-9 if backend == "bridge" else 3e-6, rtol=0)


@every_backend
def test_loading_is_silent_new_and_leaves_the_global_random_state(backend, capfd):
    before = torch.get_rng_state()
    model = tls.load_model("Tiny-RoPE", backend=backend, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.cfg.dtype == torch.bfloat16
    assert model.tlspectral_source["model"] == "tiny-rope"
    assert tls.load_model("tiny-rope", backend=backend) is not tls.load_model("tiny-rope", backend=backend)


@zoo.needs_hooked
@pytest.mark.parametrize("name", ["tiny-ape", "tiny-rope"])
def test_hooked_has_folded_norms_and_nothing_else(name):
    model, weights = loaded(name, "hooked"), read_packaged(name)[1]
    assert model.cfg.normalization_type == "LNPre"
    # The bias of a value takes up the norm's.
    weights["blocks.1.attn.b_V"] += weights["blocks.1.ln1.b"] @ weights["blocks.1.attn.W_V"]
    for written in ("embed.W_E", "blocks.0.attn.W_O", "blocks.1.attn.b_V"):
        # Float32 sums of 64 terms; the norm's bias moves b_V by tenths.
        torch.testing.assert_close(model.state_dict()[written], weights[written], atol=1e-6, rtol=0)


def test_what_a_packaged_model_has_not():
    for options in ({"revision": "main"}, {"checkpoint": 100}):
        with pytest.raises(ValueError, match="tiny-rope is one packaged set of weights"):
            find_source("tiny-rope", **options)
    with pytest.raises(ValueError, match=rf"demo model \({', '.join((*TINY, *PACKAGED))}\)"):
        find_source("tiny rope")
    if not zoo.HAS_HOOKED:
        with pytest.raises(ImportError, match='backend="bridge"'):
            tls.load_model("tiny-rope", backend="hooked")
