"""The files that hold a checkpoint's weights: which they are, the tensors in them, and reading one tensor."""

import json
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import BadWeights
from tlspectral.models.loading.damage import refusing

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that weights are loaded from, the first that exists; an index names the files that hold the weights."""


def indexed_files(index: Path) -> dict[str, str]:
    """Return the file that holds each tensor, by an index of files.

    Raises:
        BadWeights: `index` is no such index, or names a file that does not lie beside it or is of another kind.
    """
    suffix = ".safetensors" if index.name == INDEX else ".bin"
    kind = suffix.removeprefix(".") if suffix == ".safetensors" else "PyTorch"
    with refusing(f"{index} is no index of {kind} files; fetch it again"):
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): str(file) for tensor, file in named.items()}
    other = sorted({file for file in files.values() if not _beside(file, suffix)})
    if other:
        raise BadWeights(f"{index} names {other[0]}, which is no {kind} file beside it; only these are opened")
    return files


def _beside(file: str, suffix: str) -> bool:
    """Return whether a file of an index is named as a file in the same folder is."""
    name = Path(file)
    return name.name == file and name.suffix == suffix and "\0" not in file and len(file.encode()) < 256


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which transformers loads a folder's weights; none if no file has one of the usual names.

    Raises as `indexed_files`.
    """
    for name in NAMES:
        path = folder / name
        if path.is_file():
            return [folder / file for file in sorted(set(indexed_files(path).values()))] if "index" in name else [path]
    return []


def stored_names(files: list[Path]) -> dict[str, Path]:
    """Return the file that holds each tensor, by the files themselves.

    Raises:
        BadWeights: a file cannot be read.
    """
    return {name: file for file in files for name in _names_in(file)}


def stored_tensor(file: Path, name: str) -> Tensor:
    """Return one tensor of a file, mapped from it where the format allows."""
    if file.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(name)
    return _unpickled(file, "cpu", mmap=zipfile.is_zipfile(file))[name]


def _names_in(file: Path) -> list[str]:
    if file.suffix != ".safetensors":
        with refusing(f"{file} cannot be read as a PyTorch file; fetch it again"):
            return list(_unpickled(file, "meta"))
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise BadWeights(f"{file} cannot be read as safetensors ({error}); fetch it again") from error


def _unpickled(file: Path, device: str, **options: Any) -> dict[str, Tensor]:
    """Return the tensors of a PyTorch file, and run no code from it; on the device `"meta"` they have no data."""
    return torch.load(file, map_location=device, weights_only=True, **options)
