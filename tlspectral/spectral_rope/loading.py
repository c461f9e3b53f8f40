"""Spectral parameters of a file or folder, put into the ordinary model that they were learned on."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import BadHead, IncompatibleCheckpoint, TlspectralError, UnsupportedArchitecture
from tlspectral.models.loaders import Source
from tlspectral.models.loading import load_model
from tlspectral.spectral_rope.hugging_face import is_spectral_object, plain_object
from tlspectral.spectral_rope.model import to_spectral
from tlspectral.spectral_rope.saving import BASE, FORMAT, OPTIONS, SPECTRAL_CONFIG, WEIGHTS, record_of, tensors_of


def load_spectral(model: Any, path: str | os.PathLike[str]) -> Any:
    """Make a spectral model from an ordinary one and a file of `save_spectral`.

    Args:
        model: the ordinary model, of TransformerLens or Hugging Face; as for `to_spectral` it is left as it was.
        path: of the file, or of the folder of `save_pretrained`.

    Returns:
        What `to_spectral` makes of the model, with the parameters of the file.

    Raises:
        FileNotFoundError: there is no such file.
        IncompatibleCheckpoint: not such a file; made for a model of other layers, heads or inverse frequencies; or with
            parameters that are missing, of another shape or not finite.
        UnsupportedArchitecture, EditNotHonored, ScoreMismatch: as `to_spectral`.
    """
    if os.path.isdir(path):
        path = os.path.join(path, WEIGHTS)
    tensors, record = _read(path)
    try:
        spectral = to_spectral(model, **{name: record[name] for name in OPTIONS})
    except (BadHead, UnsupportedArchitecture, ValueError) as error:
        raise IncompatibleCheckpoint(f"{path} does not fit this model: {error}") from error
    made = record_of(spectral)
    for what in made.keys() - OPTIONS:
        if record[what] != made[what]:
            raise IncompatibleCheckpoint(f"{path}: {what} is {record[what]}, but {made[what]} in this model")
    _check_tensors(path, tensors, tensors_of(spectral))
    learned = {name: value for name, value in tensors.items() if not name.endswith(".theta")}
    spectral.spectral.load_state_dict(learned, strict=False)  # layers that share parameters are stored once
    return spectral


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise IncompatibleCheckpoint(f"{path} is not a safetensors file: {error}") from error
    if metadata.get("format") != FORMAT:
        raise IncompatibleCheckpoint(
            f"{path} is not a file of spectral parameters that this version reads (format {metadata.get('format')!r}, "
            f"expected {FORMAT!r}); save_spectral writes them"
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
        # Two backends read the same frequencies 1e-7 apart; another base or scaling is off by hundredths and more.
        worst = float(((value - own[name]) / own[name].clamp_min(1e-12)).abs().max()) if ".theta" in name else 0.0
        if worst > 1e-4:
            raise IncompatibleCheckpoint(
                f"{path}, layer {name.partition('.')[0]}: made for other inverse frequencies than the model's (up to "
                f"{worst:.1e} of their size apart): another rotary base or scaling"
            )


def load_claimed(given: Any, **options: Any) -> Any:
    """Return the TransformerLens model of a spectral Hugging Face model, or of the `Source` of a folder of one.

    That of an object has copies of its weights and parameters; that of a folder is its base with the folder's spectral
    parameters. `options` are those of `load_model`. Raises TypeError for another spectral model,
    IncompatibleCheckpoint for a folder that names no base; else as `load_model`, with the names of folder and base.
    """
    if isinstance(given, Source):
        return _load_folder(given, options)
    if not is_spectral_object(given):
        raise TypeError(f"this {type(given).__name__} is a spectral TransformerLens model already: use it as it is")
    record = record_of(given)
    spectral = to_spectral(load_model(plain_object(given), **options), **{name: record[name] for name in OPTIONS})
    spectral.spectral.load_state_dict(given.spectral.state_dict())
    return spectral


def _load_folder(source: Source, options: dict[str, Any]) -> Any:
    folder = Path(source.location)
    config = json.loads((folder / SPECTRAL_CONFIG).read_text(encoding="utf-8"))
    name, revision = config["base_model_name_or_path"], config["revision"]
    if name is None:
        raise IncompatibleCheckpoint(
            f"{folder / SPECTRAL_CONFIG} names no base model: it was made from a model object that came from no folder "
            "or hub; load the base, and give it to load_spectral with this folder"
        )
    # Folders of earlier versions name a folder as it was called where they were saved.
    if "relative_to" in config or (name == BASE and (folder / BASE).is_dir()):
        name = os.path.normpath(os.path.join(os.path.realpath(folder), name))
        if not os.path.isdir(name):
            raise FileNotFoundError(
                f"{folder} holds spectral parameters of the model in {name}, which is not there: move the base there, "
                "or load it and give it to load_spectral with this folder"
            )
    try:
        base = load_model(name, revision=revision, **options)
    except (TlspectralError, OSError, ValueError) as error:
        error.args = (f"{folder} holds spectral parameters of {name}, which cannot be loaded: {error}",)
        raise
    spectral = load_spectral(base, folder)
    spectral.rotated.tlspectral_source = {**base.tlspectral_source, **source.record, "base": base.tlspectral_source}
    return spectral
