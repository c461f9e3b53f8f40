"""Spectral parameters in a file: what was saved comes back. What does not fit is in test_spectral_refusals.py."""

import json

import pytest
import torch
import zoo
from safetensors import safe_open
from safetensors.torch import load
from spectral_zoo import base, logits, moved

from tlspectral import load_model
from tlspectral.spectral_rope import load_spectral, save_spectral

pytestmark = pytest.mark.lowest

OPTIONS = {
    "head": {},
    "model": {"scope": "model"},
    "linear": {"scope": "layer", "log_omega": False},
    "shared": {"scope": "group", "shared_phase": True},
    "some": {"heads": [(1, 2), (1, 3)], "frequencies": [0, 4]},
    "some-model": {"heads": [(0, 0), (0, 1), (1, 2), (1, 3)], "scope": "model"},
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "spectral.safetensors"


@pytest.mark.slow
@pytest.mark.parametrize("chosen", OPTIONS)
def test_what_was_saved_comes_back(path, chosen):
    spectral = moved("bridge", "llama", **OPTIONS[chosen])
    save_spectral(spectral, path)
    loaded = load_spectral(base("bridge", "llama"), path)
    assert loaded.base is base("bridge", "llama")
    assert torch.equal(logits(loaded), logits(spectral))
    own, found = (dict(model.spectral.named_parameters()) for model in (spectral, loaded))
    assert own.keys() == found.keys()
    assert all(torch.equal(own[name], found[name]) for name in own)
    for index, module in spectral.spectral.items():
        assert torch.equal(loaded.spectral[index].query_mask, module.query_mask)
        for name in ("scope", "log_omega", "shared_phase"):
            assert getattr(loaded.spectral[index], name) == getattr(module, name)
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["spectral"])
    about = ("theta", "query_mask", "shared_phase", "tied")
    beside = {f"{index}.{name}" for index in spectral.spectral for name in about}
    held = set(spectral.spectral.state_dict())
    assert {*own, *beside} <= held
    assert set(load(path.read_bytes())) == {*held, "base"}
    assert record["frequencies"] == OPTIONS[chosen].get("frequencies")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "smollm3"])
def test_architectures_with_layers_of_their_own_come_back(path, name):
    spectral = moved("bridge", name)
    save_spectral(spectral, path)
    assert torch.equal(logits(load_spectral(base("bridge", name), path)), logits(spectral))


@zoo.needs_hooked
def test_a_file_serves_the_other_backend(path):
    spectral = moved("bridge", "llama")
    save_spectral(spectral, path)
    loaded = load_spectral(base("hooked", "llama"), path)
    found, expected = (logits(model).log_softmax(-1) for model in (loaded, spectral))
    # The backends differ by 1e-6 among themselves; the spectral part moves the log-probabilities by tenths.
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


@pytest.mark.parametrize("name", ["learned", "learned.safetensors"])
def test_a_save_without_a_base_names_the_function_that_loads_it(tmp_path, name):
    spectral, path = moved("bridge", "llama"), tmp_path / name
    save_spectral(spectral, path)
    said = r"learned.* holds spectral parameters and no model: .* then tls\.spectral_rope\.load_spectral\(model, '"
    for given in (path, tmp_path) if path.suffix else (path,):  # of a folder, files by the ending of safetensors
        with pytest.raises(ValueError, match=said):
            load_model(given)


@pytest.mark.slow
def test_a_file_is_found_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    spectral = moved("bridge", "llama")
    save_spectral(spectral, "~/learned.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["learned.safetensors"]
    assert torch.equal(logits(load_spectral(base("bridge", "llama"), "~/learned.safetensors")), logits(spectral))


def test_a_full_disk_names_the_file_and_leaves_the_older_one(path, file_size_limit):
    spectral = moved("bridge", "llama")
    save_spectral(spectral, path)
    before = path.read_bytes()
    with file_size_limit(500), pytest.raises(OSError, match=str(path)):
        save_spectral(spectral, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
