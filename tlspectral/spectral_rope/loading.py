"""Spectral parameters of a file or folder, put into the ordinary model that they were learned on."""

import json
import os
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tlspectral.errors import BadHead, IncompatibleCheckpoint, TlspectralError, UnsupportedArchitecture
from tlspectral.models.loaders import Source
from tlspectral.models.loading import load_model
from tlspectral.models.loading.pretrained import find_tokenizer
from tlspectral.spectral_rope.hugging_face import is_spectral_object, plain_object
from tlspectral.spectral_rope.model import to_spectral
from tlspectral.spectral_rope.saving import (
    FORMAT,
    HOOKED_FORMAT,
    OPTIONS,
    SPECTRAL_CONFIG,
    parameters_file,
    record_of,
    spectral_file_of,
    tensors_of,
)
from tlspectral.spectral_rope.weights_identity import IDENTITY, from_tensor, require_same_function, require_same_weights


def load_spectral(model: Any, path: str | os.PathLike[str]) -> Any:
    """Make a spectral model from an ordinary one and a file of `save_spectral`.

    Args:
        model: the ordinary model, of TransformerLens or Hugging Face; as for `to_spectral` it is left as it was.
        path: of the file, or of the folder of `save_pretrained`.

    Returns:
        What `to_spectral` makes of the model, with the parameters of the file.

    Raises:
        TypeError: no path, such as a model in its place.
        FileNotFoundError: there is no such file.
        IncompatibleCheckpoint: not such a file; made for a model of other layers, heads, inverse frequencies or
            weights; or with parameters that are missing, of another shape or not finite.
        UnsupportedArchitecture: the model has no rotary positions, or a layer cannot be read.
        EditNotHonored: the model does not use queries or keys that are rotated at its hook points.
        ScoreMismatch: the logits at the start are not the model's own.

    What it does not establish: that the weights are the same where their bits cannot be compared: between a
    HookedTransformer and a bridge or a model of transformers, and in a lower precision. There, log-probabilities of 24
    tokens are compared.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            f"load_spectral(model, path) takes the model first, then its file; found {type(model).__name__}, then "
            f"{type(path).__name__}"
        )
    path = Path(path).expanduser()
    if path.is_dir():
        path = parameters_file(path)
    tensors, record = _read(path)
    identity = from_tensor(tensors.pop(IDENTITY))
    try:
        spectral = to_spectral(model, **{name: record[name] for name in OPTIONS})
    except (BadHead, UnsupportedArchitecture, ValueError) as error:
        raise IncompatibleCheckpoint(f"{path} does not fit this model: {error}") from error
    made = record_of(spectral)
    for what in made.keys() - OPTIONS:
        if record[what] != made[what]:
            raise IncompatibleCheckpoint(f"{path}: {what} is {record[what]}, but {made[what]} in this model")
    _check_tensors(path, tensors, tensors_of(spectral))
    try:
        spectral.spectral.load_state_dict(tensors)
    except RuntimeError as error:
        raise IncompatibleCheckpoint(f"{path}: {error}") from error
    require_same_weights(identity, model, path)
    require_same_function(identity, spectral, path)
    return spectral


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise IncompatibleCheckpoint(f"{path} is not a safetensors file: {error}") from error
    found = metadata.get("format")
    if str(found).startswith(HOOKED_FORMAT.rstrip("0123456789")):
        raise IncompatibleCheckpoint(
            f"{path} holds a whole SpectralHookedTransformer with its own weights: load it by load_model, from its "
            "folder"
        )
    if str(found).startswith(FORMAT.rstrip("0123456789")) and found != FORMAT:
        number, ours = (name.rpartition(".")[2] for name in (str(found), FORMAT))
        newer = number.isdecimal() and int(number) > int(ours)
        raise IncompatibleCheckpoint(
            f"{path} was saved by {'a newer' if newer else 'an earlier'} version of tlspectral (format {found!r}, "
            f"expected {FORMAT!r})"
            + (
                ": upgrade tlspectral"
                if newer
                else ", which kept no digest of the base, so that no model can be known to be it: learn the parameters "
                "again"
            )
        )
    if found != FORMAT or IDENTITY not in tensors:
        raise IncompatibleCheckpoint(
            f"{path} is not a file of spectral parameters that this version reads (format {found!r}, expected "
            f"{FORMAT!r}); save_spectral writes them"
        )
    return tensors, json.loads(metadata["spectral"])


def _check_tensors(path: Any, tensors: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    if own.keys() != tensors.keys():
        missing, unknown = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
        raise IncompatibleCheckpoint(f"{path}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
    for name, value in tensors.items():
        if value.shape != own[name].shape:
            raise IncompatibleCheckpoint(
                f"{path}: {name} is {tuple(value.shape)}, but {tuple(own[name].shape)} (rows, pairs) in this model"
            )
        if not bool(torch.isfinite(value).all()):
            raise IncompatibleCheckpoint(f"{path}: {name} has values that are not finite")


def load_claimed(given: Any, **options: Any) -> Any:
    """Return the TransformerLens model of a spectral Hugging Face model, or of the `Source` of a folder of one.

    For an object it has copies of the object's weights and parameters; for a folder it is the base with the folder's
    spectral parameters. `options` are as for `load_model`. Raises TypeError for another spectral model,
    IncompatibleCheckpoint for a folder whose base is not known or is another one now; and the errors of `load_model`,
    with the names of folder and base.
    """
    if isinstance(given, Source):
        return _load_folder(given, options)
    if not is_spectral_object(given):
        raise TypeError(f"this {type(given).__name__} is a spectral TransformerLens model already: use it as it is")
    record = record_of(given)
    spectral = to_spectral(load_model(plain_object(given), **options), **{name: record[name] for name in OPTIONS})
    spectral.spectral.load_state_dict(given.spectral.state_dict())
    return spectral


def refuse_parameters(source: Source) -> NoReturn:
    """Raise ValueError: `source` holds spectral parameters alone, which `load_spectral` loads."""
    file = spectral_file_of(Path(source.location))
    raise ValueError(
        f"{file} holds spectral parameters and no model: load the model that they were learned on, then "
        f"tls.spectral_rope.load_spectral(model, {str(file)!r})"
    )


def _load_folder(source: Source, options: dict[str, Any]) -> Any:
    folder = Path(source.location)
    config = json.loads((folder / SPECTRAL_CONFIG).read_text(encoding="utf-8"))
    tensors, _ = _read(parameters_file(folder))
    if config.get("sha256") != from_tensor(tensors[IDENTITY])["sha256"]:
        raise IncompatibleCheckpoint(
            f"{folder / SPECTRAL_CONFIG} and {parameters_file(folder)} are of two saves, so that the base is not "
            "known: save the model again"
        )
    name = _base_of(folder, config)
    if options["tokenizer"] is None:
        options = {**options, "tokenizer": find_tokenizer(source, folder, None)}
    try:
        base = load_model(name, revision=config["revision"], **options)
    except (TlspectralError, OSError, ValueError) as error:
        error.args = (f"{folder} holds spectral parameters of {name}, which cannot be loaded: {error}",)
        raise
    spectral = load_spectral(base, folder)
    spectral.rotated.tlspectral_source = {**base.tlspectral_source, **source.record, "base": base.tlspectral_source}
    return spectral


def _base_of(folder: Path, config: dict[str, Any]) -> str:
    """Return the hub id or folder of the base that `spectral_config.json` names."""
    name = config["base_model_name_or_path"]
    if "relative_to" not in config:
        return name
    name = os.path.normpath(os.path.join(os.path.realpath(folder), name))
    if not os.path.isdir(name):
        raise FileNotFoundError(
            f"{folder} holds spectral parameters of the model in {name}, which is not there: move the base there, "
            "or load it and give it to load_spectral with this folder"
        )
    if (Path(name) / SPECTRAL_CONFIG).is_file():
        raise IncompatibleCheckpoint(
            f"{folder / SPECTRAL_CONFIG} names {name} as the base, which holds spectral parameters and no base: name "
            "the folder of the model that they were learned on there"
        )
    return name
