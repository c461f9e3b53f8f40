"""Spectral parameters in a file: what was saved comes back, and a file that does not fit is refused by name."""

import json

import pytest
import torch
import zoo
from safetensors import safe_open
from safetensors.torch import load, save_file
from zoo import shared

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.spectral_rope import load_spectral, save_spectral, to_spectral


def logits(model):
    with torch.no_grad():
        return model(zoo.prompt())


def moved(model, *, seed=0, **options):
    spectral = to_spectral(model, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in spectral.spectral_parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return spectral


def rewritten(path, change):
    """The file with its tensors and its record changed in place by `change(tensors, record)`."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors, record = load(path.read_bytes()), json.loads(metadata["spectral"])
    change(tensors, record)
    save_file(tensors, path, metadata={**metadata, "spectral": json.dumps(record)})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scope": "model"},
        {"scope": "layer", "log_omega": False},
        {"scope": "group", "shared_phase": True},
        {"heads": [(1, 2), (1, 3)], "frequencies": [0, 4]},
        {"heads": [(0, 0), (0, 1), (1, 2), (1, 3)], "scope": "model"},
    ],
    ids=["head", "model", "linear", "shared", "some", "some-model"],
)
def test_what_was_saved_comes_back(tmp_path, options):
    path = tmp_path / "spectral.safetensors"
    spectral = moved(shared("bridge", "llama"), **options)
    save_spectral(spectral, path)
    loaded = load_spectral(shared("bridge", "llama"), path)
    assert loaded.base is shared("bridge", "llama")
    assert torch.equal(logits(loaded), logits(spectral))
    own, found = (dict(model.spectral.named_parameters()) for model in (spectral, loaded))
    assert own.keys() == found.keys()
    assert all(torch.equal(own[name], found[name]) for name in own)
    for index, module in spectral.spectral.items():
        assert torch.equal(loaded.spectral[index].query_mask, module.query_mask)
        for name in ("scope", "log_omega", "shared_phase"):
            assert getattr(loaded.spectral[index], name) == getattr(module, name)
    assert len(list(loaded.spectral_parameters())) == len(list(spectral.spectral_parameters()))


@pytest.mark.parametrize("name", ["gemma3", "smollm3", "gptj"])
def test_architectures_with_layers_of_their_own_come_back(tmp_path, name):
    path = tmp_path / "spectral.safetensors"
    spectral = moved(shared("bridge", name))
    save_spectral(spectral, path)
    assert torch.equal(logits(load_spectral(shared("bridge", name), path)), logits(spectral))


@zoo.needs_hooked
def test_a_file_serves_the_other_backend(tmp_path):
    path = tmp_path / "spectral.safetensors"
    spectral = moved(shared("bridge", "llama"))
    save_spectral(spectral, path)
    loaded = load_spectral(shared("hooked", "llama"), path)
    found, expected = (logits(model).log_softmax(-1) for model in (loaded, spectral))
    # The backends differ by 1e-6 among themselves; the spectral part moves the log-probabilities by tenths.
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)


def test_the_file_says_what_is_in_it(tmp_path):
    path = tmp_path / "spectral.safetensors"
    save_spectral(moved(shared("bridge", "llama")), path)
    parts = ("log_omega_shift", "phase", "gain", "theta")
    assert sorted(load(path.read_bytes())) == sorted(f"{index}.{part}" for index in range(2) for part in parts)
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["spectral"])
    assert record["n_kv_heads"] == {"0": 2, "1": 2}
    assert record["frequencies"] is None


def test_only_a_spectral_model_is_saved(tmp_path):
    with pytest.raises(TypeError, match="not a spectral model"):
        save_spectral(shared("bridge", "llama"), tmp_path / "spectral.safetensors")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        save_spectral(to_spectral(shared("bridge", "llama")), tmp_path / "none" / "spectral.safetensors")


def test_a_full_disk_names_the_file_and_leaves_the_older_one(tmp_path, file_size_limit):
    path = tmp_path / "spectral.safetensors"
    save_spectral(moved(shared("bridge", "llama")), path)
    before = path.read_bytes()
    with file_size_limit(500), pytest.raises(OSError, match=str(path)):
        save_spectral(moved(shared("bridge", "llama"), seed=1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_spectral(shared("bridge", "llama"), tmp_path / "none.safetensors")


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "spectral.safetensors"
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(IncompatibleCheckpoint, match="not a safetensors file"):
        load_spectral(shared("bridge", "llama"), path)
    save_file({"w": torch.zeros(1)}, path)
    with pytest.raises(IncompatibleCheckpoint, match="format None"):
        load_spectral(shared("bridge", "llama"), path)


def edit_omega(make):
    def change(tensors, record):
        tensors["1.omega"] = make(tensors["1.omega"])

    return change


def put(role, index, value):
    def change(tensors, record):
        record[role][index] = value

    return change


def drop(tensors, record):
    del tensors["1.phase"]


def add(tensors, record):
    tensors["1.amplitude"] = torch.zeros(1)


def no_theta(tensors, record):
    del tensors["0.theta"]


def other_base(tensors, record):
    tensors["1.theta"] = tensors["1.theta"] ** 1.01


def other_pairs(tensors, record):
    tensors["1.theta"] = tensors["1.theta"][:4].clone()


def more_layers(tensors, record):
    record["n_layers"] = 4


def unknown_pair(tensors, record):
    record["frequencies"] = [99]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit_omega(lambda omega: omega[:1].clone()), r"1\.omega is \(1, 6\), but \(2, 6\)"),
        (edit_omega(lambda omega: omega[:, :3].clone()), r"1\.omega is \(2, 3\), but \(2, 6\)"),
        (edit_omega(lambda omega: omega.repeat_interleave(2, 0)), r"1\.omega is \(4, 6\), but \(2, 6\)"),
        (edit_omega(lambda omega: omega / 0), r"1\.omega has values that are not finite"),
        (drop, r"missing \['1.phase'\], unknown nothing"),
        (add, r"missing nothing, unknown \['1.amplitude'\]"),
        (no_theta, "layer 0: no theta"),
        (other_base, "layer 1: made for other inverse frequencies"),
        (other_pairs, r"layer 1: theta of shape \(4,\), but the model has 6 rotary pairs"),
        (more_layers, "is of a model of 4 layers, this one has 2"),
        (put("n_heads", "0", 8), "layer 0: n_heads is 8, but 4"),
        (put("n_kv_heads", "1", 4), "layer 1: n_kv_heads is 4, but 2"),
        (put("heads", 0, [1, 7]), "does not fit this model: L1H7 does not exist"),
        (unknown_pair, "does not fit this model: layer 0: frequencies are 0 to 5"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path, change, said):
    path = tmp_path / "spectral.safetensors"
    save_spectral(to_spectral(shared("bridge", "llama"), log_omega=False), path)
    rewritten(path, change)
    with pytest.raises(IncompatibleCheckpoint, match=said):
        load_spectral(shared("bridge", "llama"), path)


@pytest.mark.parametrize(
    ("name", "said"), [("gpt2", "n_kv_heads is 2, but 4"), ("llama3", "other inverse frequencies")]
)
def test_a_file_of_another_model_is_refused(tmp_path, name, said):
    path = tmp_path / "spectral.safetensors"
    save_spectral(to_spectral(shared("bridge", "llama"), log_omega=False), path)
    with pytest.raises(IncompatibleCheckpoint, match=said):
        load_spectral(shared("bridge", name), path)
