"""Damaged files end in one refusal of this package that names the file, on both roads, or load and pass its checks."""

import random
import shutil
import time

import huggingface_hub
import pytest
import zoo
from checkpoint_folders import sharded, streamed
from damaged_files import other_bytes, other_json, outcome, write_gguf

from tlspectral.errors import BadWeights, UnsupportedArchitecture
from tlspectral.models.loading import load_model


def loaded(path):
    return load_model(path)(zoo.prompt())


ROADS = {"loaded": loaded, "streamed": streamed}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints in one file and in several, with their tokenizer. Not to be changed."""
    root = tmp_path_factory.mktemp("whole")
    folders = {}
    for name in ("llama", "gpt2", "gemma2", "qwen3"):
        folders[name] = zoo.save_folder(name, root / name, tokenizer=True)
    folders["sharded"] = sharded(root / "sharded").parent
    return folders


KINDS = {
    "config.json": (("llama", "gpt2", "gemma2", "qwen3"), other_json),
    "generation_config.json": (("llama",), other_json),
    "model.safetensors.index.json": (("sharded",), other_json),
    "model.safetensors": (("llama", "gpt2"), lambda content, numbers: other_bytes(content, numbers, within=2000)),
    "tokenizer.json": (("llama",), other_json),
    "tokenizer_config.json": (("llama",), other_json),
}


FAST = ("config.json", "model.safetensors.index.json", "model.safetensors")


@pytest.mark.fast(1)
@pytest.mark.tl4
@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize(
    ("kind", "count"),
    [*((kind, 4) for kind in FAST), *zoo.also_slow(*((kind, 12) for kind in KINDS))],
)
def test_a_damaged_file_is_refused_by_name(checkpoints, tmp_path, kind, count, road, full):
    """A file of a folder is damaged anew for each seed."""
    (names, change), refused = KINDS[kind], 0
    count = 200 if full and count > 4 else count
    for seed in range(count):
        folder = shutil.copytree(checkpoints[names[seed % len(names)]], tmp_path / f"{kind}-{seed}")
        file = folder / kind
        file.write_bytes(change(file.read_bytes(), random.Random(f"{kind} {seed}")))
        refused += isinstance(outcome(ROADS[road], folder, file), str)
        shutil.rmtree(folder)
    assert refused > count / 10 or not kind.startswith(("config", "model"))


# --- GGUF ---


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    pytest.importorskip("gguf")
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("count", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_a_damaged_gguf_file_is_refused_by_name(gguf_file, tmp_path, own_cache, count, full):
    # Rows of queries and keys are not in llama.cpp's order, so the logits are not those of the zoo's model.
    assert loaded(gguf_file).isfinite().all()
    whole, refused = gguf_file.read_bytes(), 0
    header = whole.index(b"blk.1") + 500
    count *= 4 if full and count > 5 else 1
    for seed in range(count):
        file = tmp_path / f"damaged-{seed}.gguf"
        file.write_bytes(other_bytes(whole, random.Random(f"gguf {seed}"), within=header if seed % 4 else None))
        if file.read_bytes()[:4] == b"GGUF":  # another file is not taken for one
            refused += isinstance(outcome(loaded, file, file), str)
    assert refused > count / 6


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
    with pytest.raises(BadWeights, match=r"lacking\.gguf lacks 1 of the weights"):
        load_model(file)
