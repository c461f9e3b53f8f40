"""The files of a model on disk: which hold the weights, the tensors in them, and what tells two states apart."""

import hashlib
import json
import re
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import BadWeights
from tlspectral.models.loaders import Source
from tlspectral.models.loading.damage import refusing

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMES = (WHOLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Usual names of files of weights, in the order in which every road looks for them; an index names other files."""

ADAPTER_CONFIG = "adapter_config.json"
"""Describes an adapter (LoRA), whose folder holds no whole model."""

# What a model and its tokenizer are made of. Other files beside the weights do not make it another model.
_MODEL_FILE = re.compile(
    r".*\.(safetensors|bin|pt|pth|model|index\.json)|((adapter_|spectral_|tokenizer_)?config|tokenizer|special_tokens_map|added_tokens|vocab|tekken)"
    r"\.json|(merges|vocab)\.txt"
)
# What transformers or another program takes a folder for a model by.
_OF_A_MODEL = re.compile(
    r"((adapter_)?config|params|.*\.index)\.json|.*\.(safetensors|gguf|h5|msgpack)"
    r"|(pytorch_|adapter_)?(model|consolidated).*\.(bin|pt|pth|ckpt|onnx)"
)
_READ_AT_ONCE = 1 << 24  # bytes
_SNAPSHOT = re.compile(r".*/models--[^/]+/snapshots/([0-9a-f]{40})")


def snapshot_commit(folder: Path) -> dict[str, str]:
    """Return `commit` of a folder that is a snapshot in the hub's cache; of another folder, nothing."""
    match = _SNAPSHOT.fullmatch(folder.resolve().as_posix())
    return {"commit": match[1]} if match else {}


def held_model(folder: Path) -> list[Path]:
    """Return the files by which a folder holds a model, whole or an adapter; an empty list where there is no folder."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if _OF_A_MODEL.fullmatch(file.name) and not file.is_dir())


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
    kind, suffix = ("PyTorch", ".bin") if index.name == NAMES[-1] else ("safetensors", ".safetensors")
    with refusing(f"{index} is no index of {kind} files; fetch it again"):
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): str(file) for tensor, file in named.items()}
    for file in sorted(set(files.values())):
        if Path(file).name != file or Path(file).suffix != suffix or "\0" in file or len(file.encode()) > 255:
            raise BadWeights(f"{index} names {file}, which is no {kind} file beside it; only these are opened")
    return files


def weight_names(config: Any) -> tuple[str, ...]:
    """Return the names of files that a model's weights are loaded from, the first that exists.

    `config` is a config of transformers, or what config.json holds.
    """
    own = config if isinstance(config, Mapping) else vars(config)
    named = own.get("transformers_weights")
    return (named,) if isinstance(named, str) else NAMES


def require_one_kind(folder: Path, names: Collection[str]) -> None:
    """Refuse by BadWeights weights in one file beside an index of others: it is not known which are the model's.

    `names` are what `weight_names` returns. An index that names the one file is no other model.
    """
    for whole, index in (NAMES[:2], NAMES[2:]):
        if not {whole, index} <= {*names} or not (folder / whole).is_file() or not (folder / index).is_file():
            continue
        others = sorted({*indexed_files(folder / index).values()} - {whole})
        if others:
            raise BadWeights(
                f"{folder} holds {whole} and {index}, which names {len(others)} other files, such as {others[0]}, so "
                "that it is not known which are the model's weights; move one of the two to another folder"
            )


def stored_tensors(folder: Path, config: Any) -> dict[str, Path]:
    """Return the file of each tensor that transformers loads from a folder; empty if no usual file is there.

    Raises BadWeights as `require_one_kind`, `indexed_files` and `require_indexed`.
    """
    names = weight_names(config)
    require_one_kind(folder, names)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return {}
    if path.suffix != ".json":
        return dict.fromkeys(names_in(path), path)
    named = indexed_files(path)
    held = {file: names_in(folder / file) for file in sorted(set(named.values()))}
    require_indexed(path, named, held, lambda file: folder / file)
    return {tensor: folder / file for file, tensors in held.items() for tensor in tensors}


def require_indexed(
    index: Path, named: Mapping[str, str], held: Mapping[str, Iterable[str]], path_of: Callable[[str], Path]
) -> None:
    """Raise BadWeights if a file holds a copy, with other values, of a tensor that the index gives to another file.

    The message names the tensor and both files.

    transformers loads every tensor of every file that the index names, whichever file the index gives it to. A copy
    with equal values is accepted, and so is a tensor of one file that the index does not name.

    Args:
        index: the index, and what it says in `named`: the file of each tensor.
        held: the tensors in files that were opened.
        path_of: returns the path of a file that the index names.
    """
    meant = dict(named)
    for file, tensors in held.items():
        for tensor in tensors:
            other = meant.setdefault(tensor, file)
            if other == file:
                continue
            if tensor not in (held[other] if other in held else names_in(path_of(other))):
                raise BadWeights(
                    f"{index} says that {tensor} is in {other}, and it is in {file}: the index is not the one of these "
                    "files; fetch both again"
                )
            values = [stored_tensor(path_of(one), tensor) for one in (other, file)]
            if values[0].dtype is not values[1].dtype or not torch.equal(*values):
                raise BadWeights(
                    f"{other} and {file} in {index.parent} both hold {tensor}, with different values, and {index.name} "
                    f"names {'the first' if tensor in named else 'neither'} for it; fetch both again, or remove the "
                    "copy that is not the model's"
                )


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
    """Return the names of the tensors in a file. Raises BadWeights for one that is damaged."""
    if file.suffix == ".safetensors":
        with safetensors_file(file) as opened:
            return list(opened.keys())
    with refusing(f"{file} cannot be read as a PyTorch file; fetch it again"):
        return list(torch.load(file, map_location="meta", weights_only=True))  # tensors there have no data


def stored_tensor(file: Path, name: str) -> Tensor:
    """Return one tensor of a file, mapped from it where the format allows."""
    if file.suffix == ".safetensors":
        with safetensors_file(file) as opened:
            return opened.get_tensor(name)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))[name]


def model_files(source: Source) -> list[Path]:
    """Return the files of a model on disk, sorted by name; a GGUF file in parts has them in order."""
    if source.parts:
        return list(source.parts)
    files = Path(source.location).iterdir()
    return sorted(file for file in files if _MODEL_FILE.fullmatch(file.name) and file.is_file())


def file_name(shown: str, identity: str) -> str:
    """Return a readable name of a file, without suffix, that nothing of another identity has."""
    readable = re.sub(r"[^\w.-]+", "--", shown).strip("-.")[-80:]
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def files_state(source: Source) -> str:
    """Hash names, sizes and times of a model's files, without reading them."""
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in model_files(source)]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def files_digest(source: Source) -> str:
    """Hash names and contents of a model's files."""
    digest = hashlib.sha256()
    for file in model_files(source):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_READ_AT_ONCE):
                digest.update(block)
    return digest.hexdigest()
