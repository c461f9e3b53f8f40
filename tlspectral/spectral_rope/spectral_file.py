"""The file of saved rotations: a safetensors file whose metadata hold a record of the model, under one SHA-256.

It holds spectral parameters alone, whose weights are elsewhere, or a whole `SpectralHookedTransformer`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.models.reading.digests import digest_of_named
from tlspectral.spectral_rope.spectral_layers import layers_of
from tlspectral.spectral_rope.weights_identity import IDENTITY, as_tensor, from_tensor
from tlspectral.tables.parquet import naming_file

FORMAT = "tlspectral.spectral_rope.3"

HOOKED = "hooked_transformer"
"""Key of the config in the record of a file that holds a whole model."""

_OF_ANY_VERSION = "tlspectral.spectral_"


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return the spectral parameters of a model by layer, and what else their rotation depends on."""
    return on_their_own(model.spectral.state_dict())


def on_their_own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU, none of which shares memory with another, as safetensors stores them."""
    return {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}


def options_of(model: Any) -> dict[str, Any]:
    """Return the arguments of `to_spectral` that give a model modules like those of a spectral one, as JSON."""
    layers = layers_of(model)
    first = next(iter(layers.values()))
    pairs = first.query_mask.any(0)
    return {
        "scope": first.scope,
        "log_omega": first.log_omega,
        "shared_phase": first.shared_phase,
        "heads": [
            [index, head]
            for index, module in layers.items()
            for head in module.query_mask.any(1).nonzero().flatten().tolist()
        ],
        "frequencies": None if bool(pairs.all()) else pairs.nonzero().flatten().tolist(),
    }


def write_file(
    path: Path, shown: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any], identity: Mapping[str, Any]
) -> None:
    """Write a file of a spectral model. Raises OSError for a full disk, which names `shown`."""
    held, text = {**tensors, IDENTITY: as_tensor(identity)}, json.dumps(record)
    try:
        with naming_file(shown):
            save_file(held, path, {"format": FORMAT, "spectral": text, "sha256": _digest(held, text)})
    except SafetensorError as error:
        raise OSError(f"cannot write {shown}: {error}") from error


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Return the tensors, the record and the identity of a file.

    Raises FileNotFoundError, and IncompatibleCheckpoint for a file that is damaged, of another version, or another's.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, since the file may be replaced while the model is in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise IncompatibleCheckpoint(f"{path} is not a safetensors file: {error}") from error
    require_format(path, metadata.get("format"))
    not_finite = first_not_finite(tensors)
    if not_finite is not None:
        raise IncompatibleCheckpoint(f"{path}: {not_finite} has values that are not finite")
    text, written = metadata.get("spectral", ""), metadata.get("sha256", "")
    if (found := _digest(tensors, text)) != written:
        raise IncompatibleCheckpoint(
            f"{path} does not hold what was saved (SHA-256 {found[:12]}, {written[:12] or 'none'} when it was "
            "written): copy it again, or save the model again"
        )
    return tensors, json.loads(text), from_tensor(tensors.pop(IDENTITY))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of a tensor with a value that is not finite, None where there is none."""
    return next((name for name, value in tensors.items() if not bool(torch.isfinite(value).all())), None)


def require_format(path: Path, found: Any) -> None:
    """Raise IncompatibleCheckpoint for what another version saved, or another program."""
    if found == FORMAT:
        return
    if not str(found).startswith(_OF_ANY_VERSION):
        raise IncompatibleCheckpoint(
            f"{path} is of no saved spectral model (format {found!r}, expected {FORMAT!r}); save_spectral and "
            "save_pretrained write them"
        )
    number, ours = (name.rpartition(".")[2] for name in (str(found), FORMAT))
    newer = number.isdecimal() and int(number) > int(ours)
    raise IncompatibleCheckpoint(
        f"{path} was saved by {'a newer' if newer else 'an earlier'} version of tlspectral (format {found!r}, expected "
        f"{FORMAT!r}): {'upgrade tlspectral' if newer else 'load it with that version, or train and save it again'}"
    )


def record_in(path: Path) -> dict[str, Any] | None:
    """Return the record of a file, None for one that is not of this version's format. Tensors are not read."""
    metadata = _metadata(path)
    try:
        record = json.loads(metadata["spectral"]) if metadata.get("format") == FORMAT else None
    except (KeyError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def holds_parameters(path: Path) -> bool:
    """Return whether a file holds spectral parameters and no weights, in this version's format."""
    record = record_in(path)
    return record is not None and HOOKED not in record


def spectral_file_of(path: Path) -> Path | None:
    """Return the file of a spectral model, of any version, that `path` is or that the folder holds; None without."""
    held = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return next((at for at in held if str(_metadata(at).get("format")).startswith(_OF_ANY_VERSION)), None)


def _metadata(path: Path) -> dict[str, str]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    return hashlib.sha256(f"{digest_of_named(tensors)} {text}".encode()).hexdigest()
