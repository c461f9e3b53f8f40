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
import transformers
import zoo
from checkpoint_folders import ROADS, sharded, streamed, with_config, with_files

import tlspectral as tls
import tlspectral.models.loading
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.loading.finding import find_source
from tlspectral.models.reading import attention_view

HOOKED = pytest.param("hooked", "llama", marks=zoo.needs_hooked)
NAME = "maker/model"
DETAILS = ["tokenizer_config.json", "tokenizer.json"]
# What an early version of this package left in the cache.
WITHOUT_TOKENIZER = ["config.json", "generation_config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint folder with tokenizer per kind. Not to be changed."""
    made = tmp_path_factory.mktemp("remote")
    return {name: tokenizer_kinds.save_tokenized(name, made / name) for name in tokenizer_kinds.IDS}


@pytest.fixture
def remote(folders, tmp_path):
    """A copy of the Llama, to be changed and published."""
    return shutil.copytree(folders["llama"], tmp_path / "remote")


def assert_whole(model, name="llama", seed=0):
    """Weights, and the tokenizer, in text and for the detectors."""
    ids, start, tokens = tokenizer_kinds.IDS[name], tokenizer_kinds.START[name], zoo.prompt()
    assert model.to_tokens(tokenizer_kinds.TEXT, prepend_bos=True).tolist() == [[start, *ids]]
    assert model.to_tokens(tokenizer_kinds.TEXT, prepend_bos=False).tolist() == [ids]
    assert attention_view(model).start_token == model.tokenizer.bos_token_id == start
    with torch.no_grad():
        found, expected = model(tokens), zoo.hf_model(name, seed)(tokens).logits
    # Measured: at most 1.5e-6; other weights differ by 1 and more.
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


# --- cold and warm ---


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "name"), [*(("bridge", name) for name in tokenizer_kinds.IDS), HOOKED])
def test_a_model_of_a_hub_brings_its_tokenizer_and_is_then_loaded_without_it(hub, folders, backend, name):
    commit = hub.publish(NAME, folders[name])
    model = tls.load_model(NAME, backend=backend)
    assert_whole(model, name)
    assert model.tlspectral_source == {"model": NAME, "revision": None, "commit": commit}
    assert sorted(hub.fetched) == sorted(path.name for path in folders[name].iterdir())
    hub.requests.clear()
    assert_whole(tls.load_model(NAME, backend=backend), name)
    assert hub.requests == []


@pytest.mark.slow  # two processes that import torch; the other tests put the same settings in place
def test_a_fresh_machine_with_the_hub_by_environment_variables(hub, folders, tmp_path):
    """Nothing is put in place by hand: huggingface_hub reads its own settings. The second process asks for nothing."""
    hub.publish("maker/llama", folders["llama"])
    code = f"""
import json, tlspectral
model = tlspectral.load_model("maker/llama")
print(json.dumps(model.to_tokens({tokenizer_kinds.TEXT!r}, prepend_bos=True).tolist()))
"""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    switches = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN")
    machine = {key: value for key, value in os.environ.items() if key not in switches} | settings
    machine["PYTHONPATH"] = str(Path(tlspectral.models.loading.__file__).parents[3])
    for state in ("cold", "warm"):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=machine)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [[tokenizer_kinds.START["llama"], *tokenizer_kinds.IDS["llama"]]]
        assert "tokenizer" not in done.stderr
        assert bool(hub.requests) == (state == "cold")
        hub.requests.clear()


@pytest.mark.slow
def test_what_the_streamed_route_left_is_completed_and_the_other_way_round(hub, tmp_path):
    folder = tokenizer_kinds.save_tokenized("llama", tmp_path / "remote", max_shard_size="16KB")
    shards = {path.name for path in folder.glob("*.safetensors")}
    hub.publish(NAME, folder)
    table = streamed(NAME)
    first = set(hub.fetched)
    assert first - shards == {"config.json", "model.safetensors.index.json"}
    assert 1 < len(first & shards) < len(shards)
    assert_whole(tls.load_model(NAME))
    assert len(hub.fetched) == len(set(hub.fetched))  # nothing twice
    assert set(hub.fetched) == {path.name for path in folder.iterdir()}
    hub.requests.clear()
    assert streamed(NAME).equals(table)
    assert hub.requests == []


# --- weights ---

OTHER_FORMATS = [
    "pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack", "rust_model.ot",
    "model.gguf", "model.fp16.safetensors", "consolidated.safetensors", "adapter_config.json",
    "adapter_model.safetensors", "README.md",
]  # fmt: skip


@pytest.mark.slow
def test_weights_are_fetched_once_and_in_one_format(hub, remote):
    wanted = sorted(path.name for path in remote.iterdir())
    for file in OTHER_FORMATS:
        (remote / file).write_bytes(b"not to be fetched")
    hub.publish(NAME, remote)
    assert_whole(tls.load_model(NAME))
    assert sorted(hub.fetched) == wanted
    assert hub.asked.isdisjoint(OTHER_FORMATS)


@pytest.mark.slow
@pytest.mark.tl4
def test_weights_that_are_pickles_only(hub, remote):
    (remote / "model.safetensors").unlink()
    tensors = zoo.hf_model("llama").state_dict()
    files = {name: f"pytorch_model-{1 + index % 2}-of-2.bin" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        torch.save({name: tensors[name] for name in tensors if files[name] == file}, remote / file)
    (remote / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    hub.publish(NAME, remote)
    for _ in range(2):
        assert_whole(tls.load_model(NAME))
    assert sorted(hub.fetched) == sorted(path.name for path in remote.iterdir())


@pytest.mark.slow
def test_weights_that_the_config_names(hub, remote):
    (remote / "model.safetensors").rename(remote / "mine.safetensors")
    hub.publish(NAME, with_config(remote, transformers_weights="mine.safetensors"))
    assert_whole(tls.load_model(NAME))


# --- revisions ---


def of_seed_3(path):
    zoo.hf_model("llama", seed=3).save_pretrained(path)
    return path


@pytest.fixture
def branches(hub, folders, remote):
    """Commits of two branches with other weights: main, and step8."""
    name = "maker/pythia-x"
    return name, {None: hub.publish(name, folders["llama"]), "step8": hub.publish(name, of_seed_3(remote), "step8")}


@pytest.mark.slow
def test_each_revision_has_its_own_weights_and_tokenizer(hub, branches):
    name, commits = branches
    for options, seed in [({"revision": "step8"}, 3), ({"checkpoint": 8}, 3), ({}, 0)]:
        model = tls.load_model(name, **options)
        assert_whole(model, seed=seed)
        revision = "step8" if options else None
        assert model.tlspectral_source == {"model": name, "revision": revision, "commit": commits[revision]}
    assert hub.fetched.count("model.safetensors") == 2


@pytest.mark.slow
def test_tables_of_a_revision_are_of_its_weights_and_name_its_commit(branches):
    name, commits = branches
    for revision, seed in ((None, 0), ("step8", 3)):
        table = streamed(find_source(name, revision), heads="L0")
        assert (table.attrs["revision"], table.attrs["commit"]) == (revision, commits[revision])
        expected = streamed(zoo.bridge("llama", seed), heads="L0")
        # Measured: 3e-16 between files and model; other weights differ by 0.05 and more.
        assert (table["D_head"] - expected["D_head"]).abs().max() < 1e-9
        found = tls.k_composition(find_source(name, revision), (1, 0))
        assert found.attrs["commit"] == commits[revision]
        expected = tls.k_composition(zoo.bridge("llama", seed), (1, 0))
        # Measured: 2e-16; other weights differ by 0.01 and more.
        assert abs(found.sort_values("head")["score"] - expected.sort_values("head")["score"]).max() < 1e-9
    assert streamed(find_source(name, commits["step8"]), heads="L0").equals(table)
    for read in (lambda: streamed(find_source(name, "v3")), lambda: tls.load_model(name, revision="v3")):
        with pytest.raises(ValueError, match=f"^'{name}' at revision 'v3' is not .*no branch, tag or commit 'v3'.$"):
            read()


def test_a_branch_that_has_moved_is_still_that_of_the_cache(hub, folders, remote):
    """Also where the cache has to be completed: one model is not made of two commits."""
    old = hub.publish(NAME, folders["llama"])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER)
    (of_seed_3(remote) / "tokenizer.json").write_text("{")
    hub.publish(NAME, remote)
    model = tls.load_model(NAME)
    assert model.tlspectral_source["commit"] == old
    assert_whole(model)
    assert sorted(hub.fetched) == sorted(DETAILS)


# --- bars ---


@pytest.mark.slow
@pytest.mark.parametrize("road", ["loaded", "streamed", "without progress"])
def test_a_download_shows_its_bar_and_a_cached_model_none(hub, folders, monkeypatch, capfd, road):
    """transformers' settings, which a load changes for a while, are left as the user has them."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    monkeypatch.setenv("TQDM_POSITION", "-1")  # as on a terminal
    if road == "without progress":
        monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.setattr(logging, "_tqdm_active", False)  # switched off by the user, the hub's bars are not
    hub.publish(NAME, folders["llama"])
    for state in ("cold", "warm"):
        capfd.readouterr()
        streamed(NAME) if road == "streamed" else tls.load_model(NAME)
        shown = capfd.readouterr().err
        of_a_download = state == "cold" and road != "without progress"
        assert ("model.safetensors: 100%" in shown) == ("config.json" in shown) == of_a_download
        assert shown == "" or road != "without progress"
    assert not are_progress_bars_disabled()


# --- a cache without the tokenizer ---


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("gpt2", ()), ("llama", DETAILS[:1]), ("gpt2", DETAILS[:1])])
def test_a_cache_that_lacks_the_tokenizer_is_completed(hub, folders, name, more):
    hub.publish(NAME, folders[name])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER, *more)
    assert_whole(tls.load_model(NAME), name)
    assert set(hub.fetched) == {path.name for path in folders[name].iterdir()} - {*WITHOUT_TOKENIZER, *more}
    hub.close()
    assert_whole(tls.load_model(NAME), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [("switched off", "HF_HUB_OFFLINE"), ("not there", "ConnectError"), ("gated", "accept its licence")],
)
def test_a_tokenizer_that_cannot_be_fetched_is_left_out_with_a_warning(hub, folders, monkeypatch, how, reason):
    hub.publish(NAME, folders["llama"])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER)
    if how == "switched off":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif how == "not there":
        hub.close()
    else:
        hub.refused[NAME] = 403
    with pytest.warns(UserWarning, match=rf"^maker/model is loaded without its tokenizer: .*{reason}"):
        assert tls.load_model(NAME).tokenizer is None


@pytest.mark.slow
@pytest.mark.tl4
def test_a_tokenizer_without_its_settings_or_without_its_vocabulary(hub, folders, remote):
    """Without settings it can lack its start token."""
    hub.publish(NAME, folders["neox"])
    hub.put_in_cache(NAME, *WITHOUT_TOKENIZER, "tokenizer.json")
    hub.close()
    with pytest.warns(UserWarning, match=r"with a tokenizer that may be incomplete: tokenizer_config\.json of"):
        assert tls.load_model(NAME).tokenizer is not None
    (remote / "tokenizer.json").unlink()
    with pytest.warns(UserWarning, match=r"without its tokenizer: .*: its files in .* hold no vocabulary"):
        assert tls.load_model(remote).tokenizer is None


@pytest.mark.slow
def test_a_model_that_has_no_tokenizer_is_asked_about_it_once(hub, folder):
    hub.publish(NAME, folder("llama"))
    assert tls.load_model(NAME).tokenizer is None
    hub.close()
    assert tls.load_model(NAME).tokenizer is None


# --- what cannot be had ---


def gated(hub, remote):
    hub.publish(NAME, remote)
    hub.refused[NAME] = 401


def gated_behind_its_config(hub, remote):
    hub.publish(NAME, remote)
    hub.put_in_cache(NAME, "config.json")
    hub.refused[NAME] = 403


def without_files(*kept):
    def publish(hub, remote):
        for file in remote.iterdir():
            file.name in kept or file.unlink()
        hub.publish(NAME, remote)

    return publish


def with_an_adapter(hub, remote):
    for file in remote.iterdir():
        file.unlink()
    (remote / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    hub.publish(NAME, remote)


def leading_out(hub, remote):
    index = sharded(remote)
    with_files(index, lambda name, file: "../other.safetensors" if name == "model.norm.weight" else file)
    hub.publish(NAME, remote)


INDEX = "model.safetensors.index.json"
LICENCE = "accept its licence at http.*/maker/model, and log in .*`hf auth login`"


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    ("prepare", "error", "words", "fetched"),
    [
        (gated, ValueError, LICENCE, []),
        (gated_behind_its_config, ValueError, f"of 'maker/model' is not in the hub's cache .*{LICENCE}", []),
        (
            lambda hub, remote: None,
            ValueError,
            "^'maker/model' is not a folder, .*has no repository of this name .*private",
            [],
        ),
        (
            with_an_adapter,
            ValueError,
            "^'maker/model' on the hub is an adapter .*snapshot_download, and give its folder",
            ["adapter_config.json"],
        ),
        (without_files(), ValueError, r"did not give its config\.json: the repository has no such file", []),
        (without_files("config.json"), BadWeights, "maker/model has no (weights that|safetensors)", ["config.json"]),
        (lambda hub, remote: hub.close(), ValueError, r"did not give its config\.json: ConnectError: ", []),
        (leading_out, BadWeights, r"names \.\./other\.safetensors, which is no", ["config.json", INDEX]),
    ],
)
def test_what_cannot_be_had(hub, remote, road, prepare, error, words, fetched):
    prepare(hub, remote)
    with pytest.raises(error, match=words):
        ROADS[road](NAME)
    assert hub.fetched == fetched


def test_other_kinds_of_models_are_refused_before_their_weights_are_fetched(hub, tmp_path):
    transformers.DistilBertConfig().save_pretrained(tmp_path)
    hub.publish(NAME, tmp_path)
    with pytest.raises(UnsupportedArchitecture, match="not a causal language model"):
        tls.load_model(NAME)
    assert hub.fetched == ["config.json"]


@pytest.mark.slow
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
        assert_whole(result)
