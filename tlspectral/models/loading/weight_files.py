"""Find the weight files of a model on disk, read the tensors in them, and hash the files."""

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
"""Usual names of weight files, in the order in which they are looked for; an index names other files."""

ADAPTER_CONFIG = "adapter_config.json"
"""File that describes a LoRA adapter; its folder does not hold a whole model."""

# Files that determine a model and its tokenizer; other files in the folder do not change the model.
_MODEL_FILE = re.compile(
    r".*\.(safetensors|bin|pt|pth|model|index\.json)|((adapter_|spectral_|tokenizer_)?config|tokenizer|special_tokens_map|added_tokens|vocab|tekken)"
    r"\.json|(merges|vocab)\.txt"
)
# Files by which transformers or another program recognises a folder as a model.
_OF_A_MODEL = re.compile(
    r"((adapter_)?config|params|.*\.index)\.json|.*\.(safetensors|gguf|h5|msgpack)"
    r"|(pytorch_|adapter_)?(model|consolidated).*\.(bin|pt|pth|ckpt|onnx)"
)
_READ_AT_ONCE = 1 << 24  # bytes
_SNAPSHOT = re.compile(r".*/models--[^/]+/snapshots/([0-9a-f]{40})")


def snapshot_commit(folder: Path) -> dict[str, str]:
    """Return {"commit": hash of the commit} for a snapshot folder in the hub's cache, and {} for other folders."""
    match = _SNAPSHOT.fullmatch(folder.resolve().as_posix())
    return {"commit": match[1]} if match else {}


def held_model(folder: Path) -> list[Path]:
    """Return the files in a folder that show that it holds a model or an adapter, sorted; [] without any."""
    files = folder.iterdir() if folder.is_dir() else ()
    return sorted(file for file in files if _OF_A_MODEL.fullmatch(file.name) and not file.is_dir())


def refuse_adapter(folder: Path, name: str) -> None:
    """Raise BadWeights if a folder holds a whole model and an adapter.

    transformers would add the adapter only if peft is installed. `name`: the model's name in the message.
    """
    if (folder / ADAPTER_CONFIG).is_file():
        raise BadWeights(
            f"the folder of {name}, {folder}, holds an adapter ({ADAPTER_CONFIG}) and a whole model; move the files of "
            "the adapter to another folder"
        )


def indexed_files(index: Path) -> dict[str, str]:
    """Return a dict from tensor name to file name, read from an index file.

    Raises BadWeights if the file is not an index, or names a file in another folder or of another kind.
    """
    kind, suffix = ("PyTorch", ".bin") if index.name == NAMES[-1] else ("safetensors", ".safetensors")
    with refusing(f"{index} is no index of {kind} files; fetch it again"):
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(tensor): str(file) for tensor, file in named.items()}
    for file in sorted(set(files.values())):
        if Path(file).name != file or Path(file).suffix != suffix or "\0" in file or len(file.encode()) > 255:
            raise BadWeights(f"{index} names {file}, which is not a {kind} file in its folder; fetch the index again")
    return files


def weight_names(config: Any) -> tuple[str, ...]:
    """Return the names of weight files to look for; the first that exists is loaded.

    `config`: a config of transformers, or the content of config.json.
    """
    own = config if isinstance(config, Mapping) else vars(config)
    named = own.get("transformers_weights")
    return (named,) if isinstance(named, str) else NAMES


def require_one_kind(folder: Path, names: Collection[str]) -> None:
    """Raise BadWeights if a folder holds all weights in one file, and an index that names other files.

    `names`: the result of `weight_names`. An index that names only this file is accepted.
    """
    for whole, index in (NAMES[:2], NAMES[2:]):
        if not {whole, index} <= {*names} or not (folder / whole).is_file() or not (folder / index).is_file():
            continue
        others = sorted({*indexed_files(folder / index).values()} - {whole})
        if others:
            raise BadWeights(
                f"{folder} holds {whole} and {index}, which names {len(others)} other files, such as {others[0]}; move "
                "the file that is not the model's to another folder"
            )


def stored_tensors(folder: Path, config: Any) -> dict[str, Path]:
    """Return a dict from tensor name to the path of its file, for all tensors that transformers loads from a folder.

    config: a config of transformers, or the content of config.json. The dict is empty if the folder has none of the
    `weight_names`. Raises BadWeights for a damaged index, for two sets of weights in the folder, and for a tensor in
    two files with different values.
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
    """Raise BadWeights if two files hold the same tensor with different values.

    transformers loads every tensor of every file that the index names, in whichever file the index says it is. A copy
    with equal values is accepted, and so is a tensor that only one file holds.

    Args:
        index: the index file, for messages.
        named: from tensor name to the file in which the index says it is.
        held: from file name to the names of the tensors in it, for the files that were opened.
        path_of: function from file name to path.
    """
    file_of = dict(named)
    for file, tensors in held.items():
        for tensor in tensors:
            other = file_of.setdefault(tensor, file)
            if other == file:
                continue
            if tensor not in (held[other] if other in held else names_in(path_of(other))):
                raise BadWeights(
                    f"{index} says that {tensor} is in {other}, and it is in {file}: the index does not belong to "
                    "these files; fetch both again"
                )
            values = [stored_tensor(path_of(holder), tensor) for holder in (other, file)]
            if values[0].dtype is not values[1].dtype or not torch.equal(*values):
                raise BadWeights(
                    f"{other} and {file} in {index.parent} both hold {tensor}, with different values, and {index.name} "
                    f"names {'the first' if tensor in named else 'neither'} for it; fetch both again, or remove the "
                    "wrong copy"
                )


@contextmanager
def safetensors_file(path: Path) -> Iterator[Any]:
    """Open the safetensors file `path` and yield it; it is closed when the `with` block ends. Raises BadWeights if it
    is cut off or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise BadWeights(f"{path} cannot be read as safetensors ({error}); fetch it again") from error


def names_in(file: Path) -> list[str]:
    """Return the names of the tensors in a file of weights, safetensors or pickle. Raises BadWeights if the file is
    damaged.
    """
    if file.suffix == ".safetensors":
        with safetensors_file(file) as opened:
            return list(opened.keys())
    with refusing(f"{file} cannot be read as a PyTorch file; fetch it again"):
        return list(torch.load(file, map_location="meta", weights_only=True))  # on meta no data are read


def stored_tensor(file: Path, name: str) -> Tensor:
    """Return the tensor of this name from a file of weights on the CPU, memory-mapped if the format allows it."""
    if file.suffix == ".safetensors":
        with safetensors_file(file) as opened:
            return opened.get_tensor(name)
    return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))[name]


def model_files(source: Source) -> list[Path]:
    """Return the paths of the files that make up the model `source` on disk, sorted by name; for a GGUF file its parts
    in order.
    """
    if source.parts:
        return list(source.parts)
    files = Path(source.location).iterdir()
    return sorted(file for file in files if _MODEL_FILE.fullmatch(file.name) and file.is_file())


def file_name(shown: str, identity: str) -> str:
    """Return a file name without suffix: `shown` made safe for a file system, and 10 digits of a hash of `identity`."""
    readable = re.sub(r"[^\w.-]+", "--", shown).strip("-.")[-80:]
    return f"{readable}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}"


def files_state(source: Source) -> str:
    """Return the SHA-256 (hex) of names, sizes and change times of the files of the model `source`, without reading the
    files.
    """
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in model_files(source)]
    return hashlib.sha256(repr(states).encode()).hexdigest()


def files_digest(source: Source) -> str:
    """Return the SHA-256 (hex) of names and contents of the files of the model `source` on disk."""
    digest = hashlib.sha256()
    for file in model_files(source):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(_READ_AT_ONCE):
                digest.update(block)
    return digest.hexdigest()
