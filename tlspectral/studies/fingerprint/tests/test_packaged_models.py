"""The packaged checkpoints: what their files say, and that they load as what was trained."""

import hashlib
import importlib.resources
import shutil
import time

import pandas as pd
import pytest
import torch
import zoo
from packaged import CONSTRAINED, analyzed, detected, every_backend, every_model, free_model, loaded, sequences

import tlspectral as tls
from tlspectral.errors import BadWeights
from tlspectral.models.loading.packaged import models_folder, read_packaged
from tlspectral.models.loading.source import PACKAGED, TINY, find_source
from tlspectral.studies.common import AttentionOnlyTransformer, RandomMapTask, TransformerConfig, evaluate
from tlspectral.studies.fingerprint.packaged_models import RECIPES

pytestmark = pytest.mark.usefixtures("no_network")


def trained(name):
    """The plain-torch model that the weights were trained as."""
    record, weights = read_packaged(name)
    model = AttentionOnlyTransformer(TransformerConfig(**record["config"]))
    model.load_state_dict(weights)
    return model.eval()


# --- the files ---


@every_model
def test_the_files_are_found_in_the_package_and_small(name):
    folder = importlib.resources.files("tlspectral") / "data" / "models"
    assert models_folder() == folder
    for ending in ("json", "safetensors"):
        size = len((folder / f"{name}.{ending}").read_bytes())
        assert 1000 < size < 200_000


def test_there_is_a_recipe_for_every_packaged_model_and_no_other_file():
    assert tuple(sorted(RECIPES)) == TINY
    files = {file.name for file in models_folder().iterdir()}
    assert files == {f"{name}.{ending}" for name in TINY for ending in ("json", "safetensors")}


@every_model
def test_the_record_says_how_the_weights_were_made(name):
    record, weights = read_packaged(name)
    recipe = RECIPES[name]
    assert record["sha256"] == hashlib.sha256((models_folder() / f"{name}.safetensors").read_bytes()).hexdigest()
    assert record["command"] == f"python -m tlspectral.studies.fingerprint.packaged_models {name}"
    assert (record["task"], record["training"]) == (vars(recipe.task), vars(recipe.training))
    assert TransformerConfig(**record["config"]) == recipe.config
    if name in CONSTRAINED:
        assert record["penalty"] == {"name": recipe.penalty.__name__, "weight": 10.0}
    else:
        assert "penalty" not in record
    assert {"torch", "tlspectral", "python", "transformer-lens"} <= set(record["versions"])
    assert weights["blocks.0.attn.W_Q"].shape == (4, 64, 16)


@every_model
def test_the_record_says_what_the_weights_do(name):
    """The metrics, measured again; another build of torch rounds otherwise."""
    metrics = read_packaged(name)[0]["metrics"]
    found = evaluate(trained(name), RandomMapTask().sample(64, torch.Generator().manual_seed(99)))
    for metric, value in found.items():
        assert metrics[metric] == pytest.approx(value, abs=1e-4)
    heads = pd.DataFrame(metrics["heads"])
    pd.testing.assert_frame_equal(heads, detected(name)[list(heads)], rtol=0, atol=1e-4)
    if name in CONSTRAINED:
        assert metrics["penalty"] == pytest.approx(RECIPES[name].penalty(trained(name)).item(), abs=1e-5)
        spectra = pd.DataFrame(metrics["spectra"])
        pd.testing.assert_frame_equal(spectra, analyzed(name)[list(spectra)], rtol=0, atol=1e-4)


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_changed_weights_are_refused(tmp_path, monkeypatch, place):
    folder = shutil.copytree(models_folder(), tmp_path / "models")
    read_packaged("tiny-rope", folder)
    file = folder / "tiny-rope.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    with pytest.raises(BadWeights, match=r"not the file that tiny-rope\.json describes.*packaged_models tiny-rope"):
        read_packaged("tiny-rope", folder)
    monkeypatch.setattr("tlspectral.models.loading.packaged.models_folder", lambda: folder)
    with pytest.raises(BadWeights, match="install the package again"):
        tls.load_model("tiny-rope")


# --- loading ---


@every_backend
@every_model
def test_logits_are_those_of_the_trained_model(name, backend):
    tokens = sequences().tokens
    with torch.no_grad():
        expected, found = trained(name)(tokens), loaded(name, backend)(tokens)
    # Measured: at most 1.1e-5 in logits of up to 6 (rounding in float32; see the next test).
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), atol=2e-5, rtol=0)


@every_backend
@every_model
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
@every_model
def test_a_loaded_model_is_ready(name, backend):
    model = loaded(name, backend)
    digest = read_packaged(name)[0]["sha256"]
    assert model.tlspectral_source == {"model": name, "revision": digest[:12], "sha256": digest}
    assert model.cfg.model_name == name
    assert (model.cfg.d_vocab, model.cfg.n_ctx, model.tokenizer) == (32, 128, None)
    assert not model.training
    assert not any(module.training for module in model.modules())


@free_model
def test_loading_is_quick_silent_and_repeatable(name, capfd):
    began = time.perf_counter()
    first, second = (tls.load_model(name) for _ in range(2))
    assert time.perf_counter() - began < 5  # measured: 0.1 s
    assert first is not second
    assert capfd.readouterr() == ("", "")


@every_backend
def test_loading_leaves_the_global_random_state(backend):
    before = torch.get_rng_state()
    tls.load_model("tiny-rope", backend=backend)
    assert torch.equal(torch.get_rng_state(), before)


@every_backend
def test_dtype_and_name(backend):
    model = tls.load_model("Tiny-RoPE", backend=backend, dtype="bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.cfg.dtype == torch.bfloat16
    assert model.tlspectral_source["model"] == "tiny-rope"


@pytest.mark.skipif(zoo.HAS_HOOKED, reason="TransformerLens 3 has it")
def test_hooked_on_transformer_lens_4():
    with pytest.raises(ImportError, match='backend="bridge"'):
        tls.load_model("tiny-rope", backend="hooked")


@zoo.needs_hooked
@every_model
def test_hooked_has_folded_norms_and_nothing_else(name):
    model, weights = loaded(name, "hooked"), read_packaged(name)[1]
    assert model.cfg.normalization_type == "LNPre"
    for written in ("embed.W_E", "blocks.0.attn.W_O", "blocks.1.attn.b_V"):
        found = model.state_dict()[written]
        if written == "blocks.1.attn.b_V":  # takes up the norm's bias
            weights[written] = weights[written] + weights["blocks.1.ln1.b"] @ weights["blocks.1.attn.W_V"]
        torch.testing.assert_close(found, weights[written], atol=1e-6, rtol=0)


def test_there_is_no_revision_to_choose():
    for options in ({"revision": "main"}, {"checkpoint": 100}):
        with pytest.raises(ValueError, match="tiny-rope is one packaged set of weights"):
            find_source("tiny-rope", **options)


def test_a_wrong_name_is_told_the_right_ones():
    with pytest.raises(ValueError, match=rf"demo model \({', '.join((*TINY, *PACKAGED))}\)"):
        find_source("tiny rope")
