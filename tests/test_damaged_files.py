"""Damaged files end in one refusal of this package that names the file, on both roads, or load and pass its checks."""

import json
import random
import shutil
import time

import pytest
import zoo
from damaged_files import other_bytes, other_json, outcome, write_gguf

import tlspectral as tls
import tlspectral.models.loading.gguf as gguf
from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.loading import load_model


def loaded(path):
    return load_model(path)(zoo.prompt())


def streamed(path):
    return tls.analyze_heads(path, detectors=False, null_draws=2, show_progress=False)


ROADS = {"loaded": loaded, "streamed": streamed}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints in one file and in several, with their tokenizer. Not to be changed."""
    root = tmp_path_factory.mktemp("whole")
    folders = {}
    for name in ("llama", "gpt2", "gemma2", "qwen3"):
        folders[name] = zoo.save_folder(name, root / name, tokenizer=True)
    folders["sharded"] = root / "sharded"
    zoo.hf_model("llama").save_pretrained(folders["sharded"], max_shard_size="16KB")
    return folders


KINDS = {
    "config.json": (("llama", "gpt2", "gemma2", "qwen3"), other_json),
    "generation_config.json": (("llama",), other_json),
    "model.safetensors.index.json": (("sharded",), other_json),
    "model.safetensors": (("llama", "gpt2"), lambda content, numbers: other_bytes(content, numbers, within=2000)),
    "tokenizer.json": (("llama",), other_json),
    "tokenizer_config.json": (("llama",), other_json),
}


def damaged(checkpoints, root, kind, seed):
    """A folder one of whose files is damaged."""
    names, change = KINDS[kind]
    folder = shutil.copytree(checkpoints[names[seed % len(names)]], root / f"{kind}-{seed}")
    file = folder / kind
    file.write_bytes(change(file.read_bytes(), random.Random(f"{kind} {seed}")))
    return folder, file


def check_files(checkpoints, root, kind, road, seeds):
    refused = 0
    for seed in seeds:
        folder, file = damaged(checkpoints, root, kind, seed)
        refused += isinstance(outcome(ROADS[road], folder, file), str)
        shutil.rmtree(folder)
    return refused


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("kind", ["config.json", "model.safetensors.index.json", "model.safetensors"])
def test_a_damaged_file_is_refused_by_name(checkpoints, tmp_path, kind, road):
    assert check_files(checkpoints, tmp_path, kind, road, range(5)) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "road"),
    [(kind, road) for kind in KINDS for road in ROADS if road == "loaded" or not kind.startswith("tokenizer")],
)  # a tokenizer is read on one road alone
def test_many_damaged_files(checkpoints, tmp_path, kind, road, full):
    seeds = range(200 if full else 30)
    refused = check_files(checkpoints, tmp_path, kind, road, seeds)
    settles = kind.startswith(("config", "model"))
    assert refused > len(seeds) / 10 if settles else refused >= 0


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "num_hidden_layers", 10**12),
        ("llama", "num_hidden_layers", 90_000),
        ("llama", "hidden_size", 2**40),
        ("llama", "vocab_size", 2**40),
        ("llama", "num_attention_heads", 0),
        ("gpt2", "n_positions", 2**30),
        ("gpt2", "n_layer", -1),
    ],
)
def test_a_config_that_asks_for_terabytes_is_refused_before_they_are_allocated(
    checkpoints, tmp_path, road, name, key, value
):
    folder = shutil.copytree(checkpoints[name], tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    start = time.perf_counter()
    if road == "streamed" and key == "vocab_size":
        streamed(folder)  # a vocabulary is not read there
    else:
        with pytest.raises((BadWeights, UnsupportedArchitecture), match=r"config\.json"):
            ROADS[road](folder)
    assert time.perf_counter() - start < 60


# --- GGUF ---


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    pytest.importorskip("gguf")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)


def test_the_undamaged_gguf_file_loads(gguf_file, own_cache):
    # Rows of queries and keys are not in llama.cpp's order, so the logits are not those of the zoo's model.
    assert loaded(gguf_file).isfinite().all()


def check_gguf(gguf_file, tmp_path, seeds):
    whole = gguf_file.read_bytes()
    header = whole.index(b"blk.1") + 500
    refused = 0
    for seed in seeds:
        file = tmp_path / f"damaged-{seed}.gguf"
        file.write_bytes(other_bytes(whole, random.Random(f"gguf {seed}"), within=header if seed % 4 else None))
        if file.read_bytes()[:4] != b"GGUF":
            with pytest.raises(ValueError, match="does not begin as a GGUF file does"):
                load_model(file)
            refused += 1
            continue
        refused += isinstance(outcome(loaded, file, file), str)
    return refused


def test_a_damaged_gguf_file_is_refused_by_name(gguf_file, tmp_path, own_cache):
    assert check_gguf(gguf_file, tmp_path, range(6)) > 0


@pytest.mark.slow
def test_many_damaged_gguf_files(gguf_file, tmp_path, own_cache, full):
    seeds = range(240 if full else 40)
    assert check_gguf(gguf_file, tmp_path, seeds) > len(seeds) / 5


@pytest.mark.parametrize("at", ["tensor_count", "kv_count", "list"])
def test_a_gguf_header_that_promises_terabytes_is_refused_at_once(gguf_file, tmp_path, own_cache, at):
    content = bytearray(gguf_file.read_bytes())
    place = {"tensor_count": 8, "kv_count": 16, "list": content.index(b"tokenizer.ggml.scores") + 21 + 4 + 4}[at]
    content[place : place + 8] = (2**60).to_bytes(8, "little")
    file = tmp_path / "huge.gguf"
    file.write_bytes(content)
    start = time.perf_counter()
    with pytest.raises((BadWeights, UnsupportedArchitecture), match=r"huge\.gguf .*promises"):
        load_model(file)
    assert time.perf_counter() - start < 30


def test_a_gguf_file_without_a_weight_is_refused(gguf_file, tmp_path, own_cache):
    """It would be left random."""
    file = tmp_path / "lacking.gguf"
    file.write_bytes(gguf_file.read_bytes().replace(b"blk.1.attn_q", b"blk.1.attn_x"))
    with pytest.raises(BadWeights, match=r"lacking\.gguf lacks 1 of the model's weights"):
        load_model(file)
