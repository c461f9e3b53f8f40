"""Read and write a file of learned rotations: safetensors, with a record of the options in its metadata.

One SHA-256 covers tensors and record. The file holds spectral parameters alone, whose weights are elsewhere, or a whole
`SpectralHookedTransformer`.
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
"""Key of the model's config in a file's record; only files of a whole model have it."""

_FORMAT_PREFIX = "tlspectral.spectral_"


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return copies, on the CPU, of the tensors that a spectral model's file holds, as a dict by name.

    Names are `{layer}.omega` (or `.log_omega_shift`), `.phase`, `.gain`, and the constants of the rotation, such as
    `.theta`.
    """
    return on_their_own(model.spectral.state_dict())


def on_their_own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a dict by name with copies of the tensors, on the CPU, which share no memory, as safetensors requires."""
    return {name: value.detach().cpu().clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}


def options_of(model: Any) -> dict[str, Any]:
    """Return a dict, for JSON, of arguments with which `to_spectral` makes this model's modules again.

    Keys: scope, log_omega, shared_phase, heads (a list of [layer, head] that learn), frequencies (indices of the rotary
    pairs that learn; None for all).
    """
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
    """Write a file of a spectral model to `path`.

    `path`: where to write, often a temporary file. `shown`: the path in messages. `tensors`: by name. `record`: the
    options, as a dict. `identity`: from `identity_of`. Raises OSError, for example for a full disk.
    """
    held, text = {**tensors, IDENTITY: as_tensor(identity)}, json.dumps(record)
    try:
        with naming_file(shown):
            save_file(held, path, {"format": FORMAT, "spectral": text, "sha256": _digest(held, text)})
    except SafetensorError as error:
        raise OSError(f"cannot write {shown}: {error}") from error


def read_file(path: Path) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Read a spectral model's file. Return three things: copies of its tensors by name, its options as a dict, and the
    identity of its weights.

    The identity is the dict that `identity_of` made. Raises FileNotFoundError, and IncompatibleCheckpoint for a file
    that is damaged, of another version or of another kind.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, since the file may be replaced while the model is in use.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise IncompatibleCheckpoint(
            f"{path} is not a safetensors file ({error}): copy it again, or save the model again"
        ) from error
    require_format(path, metadata.get("format"))
    not_finite = first_not_finite(tensors)
    if not_finite is not None:
        raise IncompatibleCheckpoint(
            f"{path}: {not_finite} has values that are not finite: save the model again with finite parameters"
        )
    text, saved_digest = metadata.get("spectral", ""), metadata.get("sha256", "")
    if (digest := _digest(tensors, text)) != saved_digest:
        raise IncompatibleCheckpoint(
            f"{path} does not hold what was saved (its SHA-256 is {digest[:12]}, and was {saved_digest[:12] or 'none'} "
            "when it was saved): copy it again, or save the model again"
        )
    return tensors, json.loads(text), from_tensor(tensors.pop(IDENTITY))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinite values; None if all are finite."""
    return next((name for name, value in tensors.items() if not bool(torch.isfinite(value).all())), None)


def require_format(path: Path, file_format: Any) -> None:
    """Raise IncompatibleCheckpoint unless `file_format` is the format that this version writes.

    `path`: the file, for the message. The message says whether the file is older, newer or of another program.
    """
    if file_format == FORMAT:
        return
    if not str(file_format).startswith(_FORMAT_PREFIX):
        raise IncompatibleCheckpoint(
            f"{path} is not a saved spectral model (format {file_format!r}, expected {FORMAT!r}): give a file that "
            "save_spectral or save_pretrained wrote"
        )
    number, ours = (name.rpartition(".")[2] for name in (str(file_format), FORMAT))
    newer = number.isdecimal() and int(number) > int(ours)
    raise IncompatibleCheckpoint(
        f"{path} was saved by {'a newer' if newer else 'an earlier'} version of tlspectral (format {file_format!r}, "
        f"expected {FORMAT!r}): "
        f"{'upgrade tlspectral' if newer else 'load it with that version, or train and save it again'}"
    )


def record_in(path: Path) -> dict[str, Any] | None:
    """Return the options in a spectral model's file as a dict, without reading tensors; None for any other file or
    version.
    """
    metadata = _metadata(path)
    try:
        record = json.loads(metadata["spectral"]) if metadata.get("format") == FORMAT else None
    except (KeyError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def holds_parameters(path: Path) -> bool:
    """Return whether a file holds spectral parameters without weights, in this version's format."""
    record = record_in(path)
    return record is not None and HOOKED not in record


def spectral_file_of(path: Path) -> Path | None:
    """Return the spectral model's file at `path` or in the folder `path`, of any version; None if it does not exist."""
    held = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return next((at for at in held if str(_metadata(at).get("format")).startswith(_FORMAT_PREFIX)), None)


def _metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file as a dict; {} if it cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def _digest(tensors: Mapping[str, Tensor], text: str) -> str:
    """Return one SHA-256, as hex, of all tensors with their names and of `text`, the options in JSON."""
    return hashlib.sha256(f"{digest_of_named(tensors)} {text}".encode()).hexdigest()
