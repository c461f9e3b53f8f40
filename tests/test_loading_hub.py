"""Models by hub name: what is fetched, what is taken from the cache, and what is said of what cannot be had."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import tokenizer_kinds
import torch
import zoo

import tlspectral as tls
import tlspectral.models.loading
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.attention import attention_view

BACKENDS = ("bridge", "hooked") if zoo.HAS_HOOKED else ("bridge",)
NAME = "maker/model"
DETAILS = ["tokenizer_config.json", "tokenizer.json"]
# What an early version of this package left in the cache.
WITHOUT_TOKENIZER = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint folder with tokenizer per kind. Not to be changed."""
    made = tmp_path_factory.mktemp("remote")
    return {name: tokenizer_kinds.save_tokenized(name, made / name) for name in tokenizer_kinds.IDS}


def assert_reads(model, name):
    """The tokenizer is on the model, in text and for the detectors."""
    ids, start = tokenizer_kinds.IDS[name], tokenizer_kinds.START[name]
    assert model.to_tokens(tokenizer_kinds.TEXT, prepend_bos=True).tolist() == [[start, *ids]]
    assert model.to_tokens(tokenizer_kinds.TEXT, prepend_bos=False).tolist() == [ids]
    assert attention_view(model).start_token == model.tokenizer.bos_token_id == start


def assert_weights(model, name, seed=0):
    tokens = zoo.prompt()
    with torch.no_grad():
        found, expected = model(tokens), zoo.hf_model(name, seed)(tokens).logits
    # Measured: at most 1.5e-6; other weights differ by 1 and more.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def streamed(name, **arguments):
    settings = {"detectors": False, "null_draws": 3, "show_progress": False, **arguments}
    return tls.analyze_heads(name, **settings)


# --- cold and warm ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", tokenizer_kinds.IDS)
def test_a_model_of_a_hub_brings_its_tokenizer_and_is_then_loaded_without_it(hub, folders, backend, name):
    commit = hub.publish(NAME, folders[name])
    model = tls.load_model(NAME, backend=backend)
    assert_reads(model, name)
    assert_weights(model, name)
    assert model.tlspectral_source == {"model": NAME, "revision": None, "commit": commit}
    assert sorted(hub.fetched) == sorted(path.name for path in folders[name].iterdir())
    hub.requests.clear()
    again = tls.load_model(NAME, backend=backend)
    assert_reads(again, name)
    assert hub.requests == []


def test_a_fresh_machine_with_the_hub_by_environment_variables(hub, folders, tmp_path):
    """Nothing is put in place by hand: huggingface_hub reads its own settings. The second process asks for nothing."""
    for name in folders:
        hub.publish(f"maker/{name}", folders[name])
    code = f"""
import json, tlspectral
for name in {list(folders)!r}:
    model = tlspectral.load_model(f"maker/{{name}}")
    print(json.dumps(model.to_tokens({tokenizer_kinds.TEXT!r}, prepend_bos=True).tolist()))
"""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN")
    machine = {key: value for key, value in os.environ.items() if key not in switches} | settings
    machine["PYTHONPATH"] = str(Path(tlspectral.models.loading.__file__).parents[2])
    expected = [[[tokenizer_kinds.START[name], *tokenizer_kinds.IDS[name]]] for name in folders]
    for state in ("cold", "warm"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=machine)
        assert done.returncode == 0, done.stderr
        assert [json.loads(line) for line in done.stdout.splitlines()] == expected
        assert "tokenizer" not in done.stderr
        assert bool(hub.requests) == (state == "cold")
        hub.requests.clear()
        if state == "cold":
            hub.others.clear()
    assert hub.others == []


@pytest.mark.parametrize("name", tokenizer_kinds.IDS)
def test_a_model_in_the_cache_needs_no_hub(hub, folders, name):
    hub.publish(NAME, folders[name])
    hub.put_in_cache(NAME, *(path.name for path in folders[name].iterdir() if path.name != "generation_config.json"))
    hub.close()
    assert_reads(tls.load_model(NAME), name)


def test_what_the_streamed_route_left_is_completed_and_the_other_way_round(hub, tmp_path):
    folder = tokenizer_kinds.save_tokenized("llama", tmp_path / "remote", max_shard_size="16KB")
    shards = {path.name for path in folder.glob("*.safetensors")}
    hub.publish(NAME, folder)
    table = streamed(NAME)
    first = set(hub.fetched)
    assert first - shards == {"config.json", "model.safetensors.index.json"}
    assert 1 < len(first & shards) < len(shards)
    model = tls.load_model(NAME)
    assert_weights(model, "llama")
    assert_reads(model, "llama")
    assert len(hub.fetched) == len(set(hub.fetched))  # nothing twice
    assert set(hub.fetched) == {path.name for path in folder.iterdir()}
    hub.requests.clear()
    assert streamed(NAME).equals(table)
    assert hub.requests == []


# --- weights ---

OTHER_FORMATS = [
    "tf_model.h5", "flax_model.msgpack", "rust_model.ot", "model.gguf", "model.fp16.safetensors",
    "consolidated.safetensors", "adapter_config.json", "adapter_model.safetensors", "README.md",
]  # fmt: skip


@pytest.mark.parametrize("shard_size", ["1GB", "16KB"])
def test_weights_are_fetched_once_and_in_one_format(hub, tmp_path, shard_size):
    folder = tokenizer_kinds.save_tokenized("llama", tmp_path / "remote", max_shard_size=shard_size)
    wanted = {path.name for path in folder.iterdir()}
    for file in ("pytorch_model.bin", "pytorch_model.bin.index.json", *OTHER_FORMATS):
        (folder / file).write_bytes(b"not to be fetched")
    hub.publish(NAME, folder)
    assert_weights(tls.load_model(NAME), "llama")
    assert sorted(hub.fetched) == sorted(wanted)
    assert hub.asked.isdisjoint(["pytorch_model.bin", "pytorch_model.bin.index.json", *OTHER_FORMATS])


@pytest.mark.parametrize("n_files", [1, 2])
def test_weights_that_are_pickles_only(hub, folders, tmp_path, n_files):
    folder = shutil.copytree(folders["llama"], tmp_path / "remote")
    (folder / "model.safetensors").unlink()
    tensors = zoo.hf_model("llama").state_dict()
    if n_files == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        files = {name: f"pytorch_model-{1 + index % 2}-of-2.bin" for index, name in enumerate(tensors)}
        for file in set(files.values()):
            torch.save({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    hub.publish(NAME, folder)
    for _ in range(2):
        model = tls.load_model(NAME)
        assert_weights(model, "llama")
        assert_reads(model, "llama")
    assert sorted(hub.fetched) == sorted(path.name for path in folder.iterdir())
    with pytest.raises(BadWeights, match="maker/model has no safetensors"):
        streamed(NAME)


def test_weights_that_the_config_names(hub, folders, tmp_path):
    folder = shutil.copytree(folders["llama"], tmp_path / "remote")
    (folder / "model.safetensors").rename(folder / "mine.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "mine.safetensors"}))
    hub.publish(NAME, folder)
    assert_weights(tls.load_model(NAME), "llama")


def test_an_index_that_leads_out_of_the_cache_is_refused(hub, tmp_path):
    folder = tokenizer_kinds.save_tokenized("llama", tmp_path / "remote", max_shard_size="16KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "../other.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.publish(NAME, folder)
    with pytest.raises(BadWeights, match=r"names \.\./other\.safetensors, which is no safetensors file beside it"):
        tls.load_model(NAME)
    assert hub.fetched == ["config.json", "model.safetensors.index.json"]


def test_other_kinds_of_models_are_refused_before_their_weights_are_fetched(hub, tmp_path):
    hub.publish(NAME, zoo.save_folder("bert", tmp_path / "remote"))
    with pytest.raises(UnsupportedArchitecture, match="not a causal language model"):
        tls.load_model(NAME)
    assert hub.fetched == ["config.json"]


# --- revisions ---


def test_each_revision_has_its_own_weights_and_tokenizer(hub, folders, tmp_path):
    late = shutil.copytree(folders["llama"], tmp_path / "late")
    zoo.hf_model("llama", seed=3).save_pretrained(late)
    commits = {None: hub.publish("maker/pythia-x", folders["llama"])}
    commits["step8"] = hub.publish("maker/pythia-x", late, branch="step8")
    for options, seed in [({"revision": "step8"}, 3), ({"checkpoint": 8}, 3), ({}, 0)]:
        model = tls.load_model("maker/pythia-x", **options)
        assert_weights(model, "llama", seed)
        assert_reads(model, "llama")
        revision = "step8" if options else None
        expected = {"model": "maker/pythia-x", "revision": revision, "commit": commits[revision]}
        assert model.tlspectral_source == expected
    assert hub.fetched.count("model.safetensors") == 2


def test_a_branch_that_has_moved_is_still_that_of_the_cache(hub, folders, tmp_path):
    """Also where the cache has to be completed: one model is not made of two commits."""
    old = hub.publish(NAME, folders["llama"])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER)
    late = shutil.copytree(folders["llama"], tmp_path / "late")
    zoo.hf_model("llama", seed=3).save_pretrained(late)
    (late / "tokenizer.json").write_text("{")
    hub.publish(NAME, late)
    model = tls.load_model(NAME)
    assert model.tlspectral_source["commit"] == old
    assert_weights(model, "llama")
    assert_reads(model, "llama")
    assert sorted(hub.fetched) == sorted(DETAILS)


@pytest.fixture
def branches(hub, folders, tmp_path):
    """Commits of two branches with other weights: main, and v2."""
    late = shutil.copytree(folders["llama"], tmp_path / "late")
    zoo.hf_model("llama", seed=3).save_pretrained(late)
    return {"main": hub.publish(NAME, folders["llama"]), "v2": hub.publish(NAME, late, branch="v2")}


@pytest.mark.parametrize("detectors", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_table_of_a_revision_is_of_its_weights_and_names_its_commit(hub, branches, detectors):
    settings = {"detectors": detectors, "null_draws": 2, "layers": [0], "show_progress": False}
    tables = {revision: tls.analyze_heads(NAME, revision=revision, **settings) for revision in ("main", "v2")}
    for revision, seed in (("main", 0), ("v2", 3)):
        attrs = tables[revision].attrs
        assert (attrs["revision"], attrs["commit"]) == (revision, branches[revision])
        expected = tls.analyze_heads(zoo.bridge("llama", seed), **settings | {"detectors": False})
        # Measured: 3e-16 between files and model; other weights differ by 0.05 and more.
        assert (tables[revision]["D_head"] - expected["D_head"]).abs().max() < 1e-9
    by_commit = tls.analyze_heads(NAME, revision=branches["v2"], **settings)
    assert by_commit.equals(tables["v2"])
    with pytest.raises(ValueError, match="there is no revision 'v3'"):
        tls.analyze_heads(NAME, revision="v3", **settings)


def test_composition_of_a_revision(hub, branches):
    tables = {revision: tls.k_composition(NAME, (1, 0), revision=revision) for revision in ("main", "v2")}
    for revision, seed in (("main", 0), ("v2", 3)):
        assert tables[revision].attrs["commit"] == branches[revision]
        expected = tls.k_composition(zoo.bridge("llama", seed), (1, 0)).sort_values("head")
        found = tables[revision].sort_values("head")
        # Measured: 2e-16; other weights differ by 0.01 and more.
        assert abs(found["score"].to_numpy() - expected["score"].to_numpy()).max() < 1e-9


def test_a_revision_of_what_has_none_is_refused(folders):
    for road in ROADS.values():
        with pytest.raises(ValueError, match="is a local folder, which has no revision='v2'"):
            road(folders["llama"], revision="v2")
    with pytest.raises(ValueError, match="tiny-rope is one packaged set of weights; it has no revision"):
        streamed("tiny-rope", revision="v2")


# --- bars ---


@pytest.mark.parametrize("road", ["loaded", "streamed"])
def test_a_download_shows_its_bar_and_a_cached_model_none(hub, folders, monkeypatch, capfd, road):
    """transformers' settings, which a load changes for a while, are left as the user has them."""
    from transformers.utils import logging

    monkeypatch.setenv("TQDM_POSITION", "-1")  # as on a terminal
    monkeypatch.setattr(logging, "_tqdm_active", False)  # switched off by the user, the hub's bars are not
    hub.publish(NAME, folders["llama"])
    tables = {"loaded": tls.load_model, "streamed": lambda name: streamed(name, show_progress=True)}
    for state in ("cold", "warm"):
        capfd.readouterr()
        tables[road](NAME)
        shown = capfd.readouterr().err
        assert ("model.safetensors: 100%" in shown) == (state == "cold")
        assert ("config.json" in shown) == (state == "cold")


def test_without_progress_a_table_shows_no_bar_of_a_download(hub, folders, monkeypatch, capfd):
    from huggingface_hub.utils import are_progress_bars_disabled

    monkeypatch.setenv("TQDM_POSITION", "-1")
    hub.publish(NAME, folders["llama"])
    capfd.readouterr()
    streamed(NAME)
    assert hub.fetched
    assert capfd.readouterr().err == ""
    assert not are_progress_bars_disabled()


# --- a cache without the tokenizer ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", tokenizer_kinds.IDS)
@pytest.mark.parametrize("more", [(), ("tokenizer_config.json",)])
def test_a_cache_that_lacks_the_tokenizer_is_completed(hub, folders, backend, name, more):
    hub.publish(NAME, folders[name])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER, *more)
    assert_reads(tls.load_model(NAME, backend=backend), name)
    lacking = {path.name for path in folders[name].iterdir()} - {*WITHOUT_TOKENIZER, *more}
    assert set(hub.fetched) == lacking
    hub.requests.clear()
    assert_reads(tls.load_model(NAME, backend=backend), name)
    assert hub.requests == []


@pytest.mark.parametrize("how", ["switched off", "not there", "gated"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_tokenizer_that_cannot_be_fetched_is_left_out_with_a_warning(hub, folders, monkeypatch, how, name):
    hub.publish(NAME, folders[name])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER)
    if how == "switched off":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif how == "not there":
        hub.close()
    else:
        hub.refused[NAME] = 403
    reason = {"switched off": "HF_HUB_OFFLINE", "not there": "ConnectError", "gated": "accept its licence"}[how]
    with pytest.warns(UserWarning, match=rf"^maker/model is loaded without its tokenizer: .*{reason}"):
        model = tls.load_model(NAME)
    assert model.tokenizer is None
    assert_weights(model, name)


def test_a_tokenizer_without_its_settings_is_loaded_with_a_warning(hub, folders):
    """It can lack its start token."""
    hub.publish(NAME, folders["neox"])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER, "tokenizer.json")
    hub.close()
    with pytest.warns(UserWarning, match=r"with a tokenizer that may be incomplete: tokenizer_config\.json of"):
        model = tls.load_model(NAME)
    assert model.tokenizer is not None


def test_a_model_that_has_no_tokenizer_is_asked_about_it_once(hub, tmp_path):
    hub.publish(NAME, zoo.save_folder("llama", tmp_path / "remote"))
    assert tls.load_model(NAME).tokenizer is None
    hub.close()
    assert tls.load_model(NAME).tokenizer is None


def test_a_folder_of_tokenizer_settings_alone_is_said(folders, tmp_path):
    folder = shutil.copytree(folders["gpt2"], tmp_path / "copy")
    for file in ("vocab.json", "merges.txt"):
        (folder / file).unlink()
    with pytest.warns(UserWarning, match=r"without its tokenizer: .*: its files in .* hold no vocabulary"):
        model = tls.load_model(folder)
    assert model.tokenizer is None


# --- what cannot be had ---

ROADS = {"loaded": tls.load_model, "streamed": streamed}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("status", [401, 403])
def test_a_gated_model_says_to_accept_its_licence_and_to_log_in(hub, folders, road, status):
    hub.publish(NAME, folders["llama"])
    hub.refused[NAME] = status
    with pytest.raises(ValueError, match=rf"accept its licence at {hub.url}/maker/model, and log in .*`hf auth login`"):
        ROADS[road](NAME)


@pytest.mark.parametrize("road", ROADS)
def test_a_model_that_is_gated_while_its_config_is_not(hub, folders, road):
    hub.publish(NAME, folders["llama"])
    hub.put_in_cache(NAME, "config.json")
    hub.refused[NAME] = 403
    with pytest.raises(ValueError, match=r"of 'maker/model' is not in the hub's cache .*accept its licence"):
        ROADS[road](NAME)


@pytest.mark.parametrize("road", ROADS)
def test_what_is_not_on_the_hub(hub, folders, tmp_path, road):
    with pytest.raises(ValueError, match=r"^'nobody/nothing' is not a folder, .*no such model on the hub, or it is pr"):
        ROADS[road]("nobody/nothing")
    (tmp_path / "bare").mkdir()
    hub.publish("maker/bare", tmp_path / "bare")
    with pytest.raises(ValueError, match=r"did not give its config\.json: the repository has no such file"):
        ROADS[road]("maker/bare")
    shutil.copy(folders["llama"] / "config.json", tmp_path / "bare")
    with pytest.raises(BadWeights, match=r"maker/bare has no (weights that transformers loads|safetensors)"):
        ROADS[road]("maker/bare")


def test_a_revision_that_is_not_on_the_hub(hub, folders):
    hub.publish(NAME, folders["llama"])
    with pytest.raises(ValueError, match=r"^'maker/model' at revision 'v2' is not .*there is no revision 'v2'"):
        tls.load_model(NAME, revision="v2")


@pytest.mark.parametrize("road", ROADS)
def test_a_hub_that_is_not_there(hub, folders, road):
    hub.close()
    with pytest.raises(ValueError, match=r"did not give its config\.json: ConnectError: "):
        ROADS[road](NAME)


@pytest.mark.parametrize("road", ROADS)
def test_a_connection_that_is_lost_in_mid_file(hub, folders, road):
    """Once, the rest is fetched; for good, it is said, and nothing of the file is taken for the whole."""
    hub.publish(NAME, folders["llama"])
    hub.cut["model.safetensors"] = 100
    with pytest.raises(ValueError, match=r"^model\.safetensors of 'maker/model' is not in the hub's cache"):
        ROADS[road](NAME)
    assert not list(hub.cache.rglob("model.safetensors"))
    hub.requests.clear()
    hub.cut["model.safetensors"] = 1
    result = ROADS[road](NAME)
    assert hub.fetched.count("model.safetensors") == 2  # up to the cut, and the rest
    if road == "loaded":
        assert_weights(result, "llama")
        assert_reads(result, "llama")
