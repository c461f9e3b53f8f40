"""Which files of a checkpoint are opened or fetched for a table that is read layer by layer."""

import json
import shutil

import pandas as pd
import pytest
import torch
from checkpoint_folders import sharded, streamed, tensors_of, with_config, with_tensors
from safetensors.torch import save_file

import tlspectral as tls
from tlspectral.errors import BadWeights

pytestmark = pytest.mark.lowest

NAME = "maker/model"
PARTS = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "input_layernorm.weight")


@pytest.fixture(scope="module")
def whole(folder):
    """A checkpoint in one file. Not to be changed."""
    return folder("llama")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The same in many files. Not to be changed."""
    path = tmp_path_factory.mktemp("sharded")
    sharded(path)
    assert len(list(path.glob("*.safetensors"))) > 5
    return path


@pytest.fixture(scope="module")
def table(whole):
    return streamed(whole)


def files_of(path):
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


def as_it_is(path):
    pass


def without_index(path):
    """Each file says itself what it holds."""
    (path / "model.safetensors.index.json").unlink()


def without_other_shards(path):
    files = files_of(path)
    needed = {file for name, file in files.items() if name.endswith(PARTS)}
    for file in set(files.values()) - needed:
        (path / file).unlink()


def with_a_second_copy(path):
    """Some hub models bring one under its maker's names, or an adapter."""
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, path / "consolidated.safetensors")


def with_an_index_of_the_one_file(path):
    """An index that names no other file is of the same weights."""
    index = {"weight_map": dict.fromkeys(tensors_of(path), "model.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def named_by_the_config(path):
    """The config says which file it is; the one under the usual name is of another model."""
    save_file(tensors_of(path), path / "mine.safetensors", {"format": "pt"})
    with_tensors(path, {name: 2 * value for name, value in tensors_of(path).items()})
    with_config(path, transformers_weights="mine.safetensors")


def without_other_weights(path):
    """The rest of the file is missing or broken."""
    tensors, broken = tensors_of(path), "model.layers.1.mlp.up_proj.weight"
    others = dict.fromkeys(name for name in tensors if not name.endswith((*PARTS, "norm.weight")))
    assert len(others) > len(tensors) / 2
    with_tensors(path, others | {broken: torch.full_like(tensors[broken], torch.nan)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_shards", "change"),
    [
        (True, as_it_is),
        (True, without_index),
        (True, without_other_shards),
        (False, with_a_second_copy),
        (False, with_an_index_of_the_one_file),
        (False, named_by_the_config),
        (False, without_other_weights),
    ],
)
def test_the_table_is_that_of_one_file(whole, shards, table, tmp_path, in_shards, change):
    path = shutil.copytree(shards if in_shards else whole, tmp_path / "copy")
    change(path)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    pd.testing.assert_frame_equal(streamed(path), table, check_exact=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["L1", None])
def test_only_the_shards_that_are_needed_are_fetched_and_once(hub, shards, table, heads):
    commit = hub.publish(NAME, shards)
    found = streamed(NAME, heads=heads)
    expected = table if heads is None else table[table["layer"] == 1].reset_index(drop=True)
    pd.testing.assert_frame_equal(
        found.drop(columns="D_head_pct"), expected.drop(columns="D_head_pct"), check_exact=True
    )
    files = files_of(shards)
    wanted = {files[f"model.layers.{layer}.{part}"] for layer in ([1] if heads else range(2)) for part in PARTS}
    assert len(wanted) < len(set(files.values()))
    assert sorted(hub.fetched) == sorted({"config.json", "model.safetensors.index.json", *wanted})
    assert (found.attrs["model"], found.attrs["commit"]) == (NAME, commit)
    hub.close()
    pd.testing.assert_frame_equal(streamed(NAME, heads=heads), found, check_exact=True)


def test_composition_fetches_values_of_earlier_layers(hub, shards, whole):
    hub.publish(NAME, shards)
    found = tls.k_composition(NAME, (1, 0))
    pd.testing.assert_frame_equal(found, tls.k_composition(whole, (1, 0)), check_exact=True)
    files = files_of(shards)
    assert files["model.layers.0.self_attn.v_proj.weight"] in hub.fetched
    assert files["model.layers.1.self_attn.v_proj.weight"] not in hub.fetched


@pytest.mark.slow
def test_a_hub_model_in_one_file_and_one_of_pickles(hub, whole, table, tmp_path):
    hub.publish(NAME, whole)
    pd.testing.assert_frame_equal(streamed(NAME), table, check_exact=True)
    assert hub.fetched == ["config.json", "model.safetensors"]
    remote = shutil.copytree(whole, tmp_path / "remote")
    (remote / "model.safetensors").rename(remote / "pytorch_model.bin")
    hub.publish("maker/pickles", remote)
    with pytest.raises(BadWeights, match="maker/pickles has no safetensors"):
        streamed("maker/pickles")
    assert hub.fetched[2:] == ["config.json"]
