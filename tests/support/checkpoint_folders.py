"""Checkpoint folders that are changed, and the two roads on which they are read."""

import functools
import json

import torch
import zoo
from safetensors.torch import load, save_file

import tlspectral as tls

streamed = functools.partial(tls.analyze_heads, detectors=False, null_draws=2)
"""The head table of a folder or hub name, read layer by layer."""

ROADS = {"loaded": tls.load_model, "streamed": streamed}


def tensors_of(path):
    return load((path / "model.safetensors").read_bytes())


def with_tensors(path, changes=None, *, rename=lambda key: key):
    """Set tensors in a folder's one file of weights, take out those that are None, and rename all."""
    tensors = tensors_of(path) | (changes or {})
    kept = {rename(name): value for name, value in tensors.items() if value is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


def with_config(path, *, described="config.json", **changes):
    """Set entries of a folder's config.json, or of another file that describes it."""
    file = path / described
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return path


def sharded(path, kind="safetensors", name="llama"):
    """Write a checkpoint in many files, of safetensors or pickles, to a folder; its index."""
    for file in path.glob("*"):
        file.unlink()
    zoo.hf_model(name).save_pretrained(path, max_shard_size="16KB")
    index = path / "model.safetensors.index.json"
    if kind == "pickles":
        for file in path.glob("*.safetensors"):
            torch.save(load(file.read_bytes()), file.with_suffix(".bin"))
            file.unlink()
        text = index.read_text().replace(".safetensors", ".bin")
        index.unlink()
        index = path / "pytorch_model.bin.index.json"
        index.write_text(text)
    return index


def with_files(index, change):
    """Let `change` name the file of each tensor in an index anew."""
    content = json.loads(index.read_text())
    content["weight_map"] = {name: change(name, file) for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
