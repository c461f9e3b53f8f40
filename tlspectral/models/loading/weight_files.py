"""The files of a checkpoint's folder: what is in it, which files hold the weights, and the tensors in them."""

import json
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import BadWeights
from tlspectral.models.loading.damage import refusing
from tlspectral.models.loading.source import Source

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that weights are loaded from, the first that exists; an index names the files that hold the weights."""

_SNAPSHOT = re.compile(r"[0-9a-f]{40}")

ADAPTER_CONFIG = "adapter_config.json"
"""Describes an adapter (LoRA), whose folder holds no whole model."""

SPECTRAL_CONFIG = "spectral_config.json"
"""Names the base of spectral parameters, whose folder holds no whole model."""


def folder_source(name: str, folder: Path, revision: str | None, checkpoint: int | None) -> Source:
    """Return the source of a folder with a model or an adapter. Raises as `find_source`."""
    if revision is not None:
        raise ValueError(
            f"{name} is a local folder, which has no revision={revision!r}; name the folder that holds it."
        )
    record = {"model": name, "revision": None}
    if checkpoint is not None:
        steps = [folder / f"step{checkpoint}", folder / f"checkpoint-{checkpoint}"]
        step_folder = next((step for step in steps if step.is_dir()), None)
        if step_folder is None:
            raise FileNotFoundError(f"{name} has neither a folder {steps[0].name} nor {steps[1].name} in it.")
        folder, record["revision"] = step_folder, step_folder.name
    record |= snapshot_commit(folder)
    if (folder / SPECTRAL_CONFIG).is_file():
        return Source("spectral", str(folder), None, record)
    if (folder / ADAPTER_CONFIG).is_file() and not any((folder / file).is_file() for file in NAMES):
        return Source("adapter", str(folder), None, record)
    if not (folder / "config.json").is_file():
        steps = sorted(step.name for pattern in ("step*", "checkpoint-*") for step in folder.glob(pattern))
        hint = f"; it holds {', '.join(steps[:4])}: choose one by checkpoint=" if steps and checkpoint is None else ""
        raise FileNotFoundError(f"{folder} has no config.json, so it is not a checkpoint folder{hint}.")
    return Source("folder", str(folder), None, record)


def snapshot_commit(folder: Path) -> dict[str, str]:
    """Return `commit` of a folder that is a snapshot in the hub's cache; of another folder, nothing."""
    folder = folder.resolve()
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--")
    return {"commit": folder.name} if is_snapshot and _SNAPSHOT.fullmatch(folder.name) else {}


def refuse_adapter(folder: Path, name: str) -> None:
    """Refuse by BadWeights a whole model with an adapter beside it, which transformers adds only where peft is."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise BadWeights(
            f"the folder of {name}, {folder}, holds an adapter ({ADAPTER_CONFIG}) and a whole model, so that it is not "
            "known which is meant; copy the files of one of them to a folder of their own"
        )


def indexed_files(index: Path) -> dict[str, str]:
    """Return the file that holds each tensor, by an index of files.

    Raises BadWeights for what is no such index, or names a file that does not lie beside it or is of another kind.
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
    """Return the files that transformers loads a folder's weights from; none under the usual names is an empty list."""
    for name in NAMES:
        path = folder / name
        if path.is_file():
            return [folder / file for file in sorted(set(indexed_files(path).values()))] if "index" in name else [path]
    return []


def stored_names(files: list[Path]) -> dict[str, Path]:
    """Return the file that holds each tensor, by the files themselves. Raises BadWeights for one that is damaged."""
    return {name: file for file in files for name in names_in(file)}


def stored_tensor(file: Path, name: str) -> Tensor:
    """Return one tensor of a file, mapped from it where the format allows."""
    if file.suffix == ".safetensors":
        with safetensors_file(file) as opened:
            return opened.get_tensor(name)
    return _unpickled(file, "cpu", mmap=zipfile.is_zipfile(file))[name]


@contextmanager
def safetensors_file(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Raises BadWeights if it is cut off or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadWeights(f"{path} cannot be read as safetensors ({error}); fetch it again") from error


def names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a file. Raises as `stored_names`."""
    if file.suffix == ".safetensors":
        with safetensors_file(file) as opened:
            return list(opened.keys())
    with refusing(f"{file} cannot be read as a PyTorch file; fetch it again"):
        return list(_unpickled(file, "meta"))


def _unpickled(file: Path, device: str, **options: Any) -> dict[str, Tensor]:
    """Return the tensors of a PyTorch file, and run no code from it; on the device `"meta"` they have no data."""
    return torch.load(file, map_location=device, weights_only=True, **options)
