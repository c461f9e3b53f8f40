"""Which files of a checkpoint are opened or fetched, and what is said of those that cannot be read."""

import json
import shutil

import huggingface_hub
import pandas as pd
import pytest
import torch
import zoo
from safetensors.torch import load, save_file

import tlspectral as tls
from tlspectral.errors import BadWeights, UnsupportedArchitecture

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def analyze(model, **arguments):
    return tls.analyze_heads(model, **{"null_draws": 3, "detectors": False, "show_progress": False, **arguments})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint in one file. Not to be changed."""
    return zoo.save_folder("gemma2", tmp_path_factory.mktemp("whole") / "gemma2")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The same in many files. Not to be changed."""
    path = tmp_path_factory.mktemp("sharded") / "gemma2"
    zoo.hf_model("gemma2").save_pretrained(path, max_shard_size="16KB")
    assert len(list(path.glob("*.safetensors"))) > 10
    return path


@pytest.fixture(scope="module")
def table(whole):
    return analyze(whole)


def changed(folder, to, change):
    """A copy in one file whose tensors `change` has changed."""
    path = shutil.copytree(folder, to)
    tensors = load((path / "model.safetensors").read_bytes())
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


# --- folders ---


def test_a_sharded_checkpoint(sharded, table):
    pd.testing.assert_frame_equal(analyze(sharded), table, check_exact=True)


def test_shards_without_an_index(sharded, table, tmp_path):
    """Each file says itself what it holds."""
    path = shutil.copytree(sharded, tmp_path / "copy")
    (path / "model.safetensors.index.json").unlink()
    pd.testing.assert_frame_equal(analyze(path), table, check_exact=True)


def test_other_safetensors_beside_the_model_are_not_taken(whole, table, tmp_path):
    """Some hub models bring a second copy under its maker's names, or an adapter."""
    path = shutil.copytree(whole, tmp_path / "copy")
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, path / "consolidated.safetensors")
    pd.testing.assert_frame_equal(analyze(path), table, check_exact=True)


def test_shards_that_no_layer_needs_may_be_missing(sharded, table, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "copy")
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in files.items() if any(part in name for part in ("q_proj", "k_proj", "input_layer"))}
    for file in set(files.values()) - needed:
        (path / file).unlink()
    pd.testing.assert_frame_equal(analyze(path), table, check_exact=True)


def test_a_needed_shard_that_is_not_there(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "copy")
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    lost = files["model.layers.3.self_attn.q_proj.weight"]
    (path / lost).unlink()
    with pytest.raises(BadWeights, match=rf"{lost}.*is not there"):
        analyze(path)


# --- pickles ---


@pytest.fixture
def no_pickles(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr("pickle.load", refuse)


def test_a_folder_of_pickles_is_refused(whole, tmp_path, no_pickles):
    path = shutil.copytree(whole, tmp_path / "copy")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(BadWeights, match=r"no safetensors \(its weights are in pytorch_model\.bin, a pickle\)"):
        analyze(path)


def test_an_index_that_names_pickles_is_refused(sharded, tmp_path, no_pickles):
    path = shutil.copytree(sharded, tmp_path / "copy")
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(".safetensors", ".bin"))
    for file in path.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    with pytest.raises(BadWeights, match=r"\.bin, which is no safetensors file beside it"):
        analyze(path)


def test_an_index_that_leads_out_of_the_folder_is_refused(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "copy")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../other.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadWeights, match=r"\.\./other\.safetensors, which is no safetensors file beside it"):
        analyze(path)


def test_a_folder_without_weights(whole, tmp_path):
    shutil.copy(whole / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        analyze(tmp_path)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        analyze(tmp_path)


# --- damage ---


@pytest.mark.parametrize("kept", [0, 4, 2000, -100])
def test_a_cut_off_file(whole, tmp_path, kept):
    path = shutil.copytree(whole, tmp_path / "copy") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadWeights, match=r"cannot be read as safetensors.*fetch it again"):
        analyze(path.parent)


def test_a_cut_off_shard_stops_the_table_before_its_first_layer(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "copy")
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    last = path / files["model.layers.3.self_attn.q_proj.weight"]
    last.write_bytes(last.read_bytes()[:-10])
    with pytest.raises(BadWeights, match="cannot be read as safetensors"):
        analyze(path, checkpoint_dir=tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{}"])
def test_a_damaged_index(sharded, tmp_path, text):
    path = shutil.copytree(sharded, tmp_path / "copy")
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(BadWeights, match="is no index of safetensors files"):
        analyze(path)


def test_an_index_that_promises_too_much(sharded, tmp_path):
    path = shutil.copytree(sharded, tmp_path / "copy")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    other = index["weight_map"]["model.layers.0.self_attn.q_proj.weight"]
    index["weight_map"]["model.layers.2.self_attn.k_proj.weight"] = other
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadWeights, match=r"does not hold model\.layers\.2\.self_attn\.k_proj\.weight"):
        analyze(path)


def test_a_damaged_config(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "copy")
    (path / "config.json").write_text("{")
    with pytest.raises(UnsupportedArchitecture, match=r"config\.json is not understood"):
        analyze(path)


# --- contradictions ---


@pytest.mark.parametrize("tensor", ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "input_layernorm.weight"])
def test_missing_tensors_are_named(whole, tmp_path, tensor):
    path = changed(whole, tmp_path / "copy", lambda tensors: tensors.pop(f"model.layers.3.{tensor}"))
    with pytest.raises(BadWeights, match=rf"layer 3: .*lacks 1 of its weights, such as model\.layers\.3\.{tensor}"):
        analyze(path, checkpoint_dir=tmp_path / "parts")
    assert not (tmp_path / "parts").exists()
    assert len(analyze(path, layers=[0, 1])) == 8  # which do not need it


@pytest.mark.parametrize("damage", ["short", "wide", "flat"])
def test_tensors_of_another_shape(whole, tmp_path, damage):
    name = "model.layers.1.self_attn.k_proj.weight"

    def change(tensors):
        value = tensors[name]
        tensors[name] = {"short": value[:16], "wide": value.repeat(2, 1), "flat": value.flatten()}[damage].clone()

    path = changed(whole, tmp_path / "copy", change)
    with pytest.raises(BadWeights, match=r"layer 1: .*k_proj\.weight .*has shape \(.*config\.json asks for \(32, 48\)"):
        analyze(path)


@pytest.mark.parametrize("change", [{"num_key_value_heads": 4}, {"head_dim": 8}, {"hidden_size": 64}])
def test_a_config_that_contradicts_the_shapes(whole, tmp_path, change):
    path = shutil.copytree(whole, tmp_path / "copy")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadWeights, match=r"layer 0: .*has shape \(.*\), and config\.json asks for"):
        analyze(path)


@pytest.mark.parametrize(("layers", "said"), [(3, "layer 3 is in the files"), (5, "layer 4: .*hold no tensors")])
def test_a_config_of_another_number_of_layers(whole, tmp_path, layers, said):
    path = shutil.copytree(whole, tmp_path / "copy")
    config = json.loads((path / "config.json").read_text())
    kinds = (config["layer_types"] * 2)[:layers]
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers, "layer_types": kinds}))
    with pytest.raises(BadWeights, match=said):
        analyze(path)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights(whole, tmp_path, kind):
    name = "model.layers.2.self_attn.q_proj.weight"
    path = changed(whole, tmp_path / "copy", lambda tensors: tensors.update({name: tensors[name].to(kind)}))
    with pytest.raises(BadWeights, match=r"layer 2: .*q_proj\.weight is stored as .*a quantised format"):
        analyze(path)


def test_weights_that_are_no_numbers_are_refused_by_layer_and_role(whole, tmp_path):
    def change(tensors):
        tensors["model.layers.1.self_attn.k_proj.weight"][3, 4] = float("nan")

    with pytest.raises(BadWeights, match="layer 1, W_K: 1 of"):
        analyze(changed(whole, tmp_path / "copy", change))


# --- the hub ---


@pytest.mark.parametrize("layers", [[2], None])
def test_only_the_shards_that_are_needed_are_fetched(hub, sharded, table, layers):
    commit = hub.publish("maker/model", sharded)
    found = analyze("maker/model", layers=layers)
    expected = table if layers is None else table[table["layer"].isin(layers)].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        found.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"), check_exact=True
    )
    files = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    parts = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "input_layernorm.weight")
    wanted = {files[f"model.layers.{layer}.{part}"] for layer in layers or range(4) for part in parts}
    assert len(wanted) < len(set(files.values()))
    assert sorted(hub.fetched) == sorted({"config.json", "model.safetensors.index.json", *wanted})
    assert found.attrs["model"] == "maker/model"
    assert found.attrs["commit"] == commit


def test_a_hub_model_in_one_file(hub, whole, table):
    hub.publish("maker/model", whole)
    pd.testing.assert_frame_equal(analyze("maker/model"), table, check_exact=True)
    assert hub.fetched == ["config.json", "model.safetensors"]


def test_a_cached_hub_model_needs_no_connection(hub, sharded, table):
    hub.publish("maker/model", sharded)
    analyze("maker/model")
    hub.close()
    pd.testing.assert_frame_equal(analyze("maker/model"), table, check_exact=True)


def test_the_cache_of_huggingface_hub_itself(whole, table, tmp_path, monkeypatch, no_network):
    home = tmp_path / "models--maker--model"
    shutil.copytree(whole, home / "snapshots" / COMMIT)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    found = analyze("maker/model")
    pd.testing.assert_frame_equal(found, table, check_exact=True)
    assert found.attrs["commit"] == COMMIT


def test_a_hub_model_of_pickles_is_refused(hub, whole, tmp_path, no_pickles):
    remote = tmp_path / "remote"
    shutil.copytree(whole, remote)
    (remote / "model.safetensors").rename(remote / "pytorch_model.bin")
    hub.publish("maker/model", remote)
    with pytest.raises(BadWeights, match="maker/model has no safetensors"):
        analyze("maker/model")
    assert hub.fetched == ["config.json"]


def test_composition_fetches_values_of_earlier_layers(hub, sharded, whole):
    hub.publish("maker/model", sharded)
    found = tls.k_composition("maker/model", (1, 0))
    pd.testing.assert_frame_equal(found, tls.k_composition(whole, (1, 0)), check_exact=True)
    files = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    assert files["model.layers.0.self_attn.v_proj.weight"] in hub.fetched
    assert files["model.layers.2.self_attn.v_proj.weight"] not in hub.fetched
