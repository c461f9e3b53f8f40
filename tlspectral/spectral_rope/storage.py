"""Spectral parameters in a safetensors file, and in a folder with the name of the base; no weights of the model."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import BadHead, IncompatibleCheckpoint, TlspectralError, UnsupportedArchitecture
from tlspectral.models.attention import attention_view
from tlspectral.models.loading import load_model
from tlspectral.models.loading.source import Source
from tlspectral.spectral_rope.hugging_face import is_hugging_face, is_spectral_object, plain_object
from tlspectral.spectral_rope.layers import layers_of
from tlspectral.spectral_rope.model import to_spectral
from tlspectral.spectral_rope.module import SpectralRoPE
from tlspectral.tables.parquet import naming_file
from tlspectral.tables.whole_file import whole_file

SPECTRAL_CONFIG = "spectral_config.json"
"""Names the base of spectral parameters, whose folder holds no whole model."""

_WEIGHTS = "model.safetensors"
_BASE = "base"
_THIS_FOLDER = "this folder"
_FORMAT = "tlspectral.spectral_rope.1"
_OPTIONS = ("scope", "log_omega", "shared_phase", "heads", "frequencies")


def save_spectral(model: Any, path: str | os.PathLike[str]) -> None:
    """Write the spectral parameters of a model, and the options that they were made with, to a safetensors file.

    Args:
        model: what `to_spectral` or `SpectralHookedTransformer` made.
        path: of the file, replaced as a whole. Its names are `{layer}.omega` (or `.log_omega_shift`), `.phase`, `.gain`
            and `.theta`, the model's own inverse frequencies.

    Raises:
        TypeError: not a spectral model.
        FileNotFoundError: the folder does not exist.
        OSError: the disk is full; the message names `path`, and an older file there stays.
    """
    content = _content(model)
    with naming_file(path), whole_file(path) as partial:
        partial.write_bytes(content)


def _content(model: Any) -> bytes:
    from safetensors.torch import save

    layers = layers_of(model)
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.spectral.named_parameters()}
    tensors |= {f"{index}.theta": module.theta.detach().cpu().clone() for index, module in layers.items()}
    text = model.config.get_text_config() if is_spectral_object(model) else None
    record = {
        "n_layers": attention_view(model).n_layers if text is None else int(text.num_hidden_layers),
        "n_heads": {index: module.n_heads for index, module in layers.items()},
        "n_kv_heads": {index: module.n_kv_heads for index, module in layers.items()},
        **_options(layers),
    }
    return save(tensors, metadata={"format": _FORMAT, "spectral": json.dumps(record)})


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
        path = os.path.join(path, _WEIGHTS)
    tensors, record = _read(path)
    view = attention_view(load_model(model) if is_hugging_face(model) else model)
    if record["n_layers"] != view.n_layers:
        raise IncompatibleCheckpoint(
            f"{path} is of a model of {record['n_layers']} layers, this one has {view.n_layers}"
        )
    for role, factor in (("n_heads", "w_q"), ("n_kv_heads", "w_k")):
        for index, wanted in record[role].items():
            count = len(getattr(view.raw(int(index)), factor))
            if count != wanted:
                raise IncompatibleCheckpoint(f"{path}, layer {index}: {role} is {wanted}, but {count} in this model")
    options = {name: record[name] for name in _OPTIONS}
    try:
        spectral = to_spectral(model, **options)
    except (BadHead, UnsupportedArchitecture, ValueError) as error:
        raise IncompatibleCheckpoint(f"{path} does not fit this model: {error}") from error
    for index, module in layers_of(spectral).items():
        _require_same_theta(path, index, tensors.pop(f"{index}.theta", None), module.theta)
    _fill(path, spectral, tensors)
    return spectral


def _options(layers: Mapping[int, SpectralRoPE]) -> dict[str, Any]:
    """Return the arguments of `to_spectral` that give modules like these, as JSON."""
    first = next(iter(layers.values()))
    pairs = first.query_mask.any(0)
    heads = [
        [index, head]
        for index, module in layers.items()
        for head in module.query_mask.any(1).nonzero().flatten().tolist()
    ]
    frequencies = None if bool(pairs.all()) else pairs.nonzero().flatten().tolist()
    return dict(zip(_OPTIONS, (first.scope, first.log_omega, first.shared_phase, heads, frequencies), strict=True))


def _read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise IncompatibleCheckpoint(f"{path} is not a safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise IncompatibleCheckpoint(
            f"{path} is not a file of spectral parameters that this version reads (format {metadata.get('format')!r}, "
            f"expected {_FORMAT!r}); save_spectral writes them"
        )
    return tensors, json.loads(metadata["spectral"])


def _require_same_theta(path: Any, layer: int, saved: Tensor | None, theta: Tensor) -> None:
    if saved is None or saved.shape != theta.shape:
        given = "no theta" if saved is None else f"theta of shape {tuple(saved.shape)}"
        raise IncompatibleCheckpoint(f"{path}, layer {layer}: {given}, but the model has {len(theta)} rotary pairs")
    # Two backends read the same frequencies 1e-7 apart; another base or scaling is off by hundredths and more.
    worst = float(((saved - theta.cpu()) / theta.cpu().clamp_min(1e-12)).abs().max())
    if not worst <= 1e-4:
        raise IncompatibleCheckpoint(
            f"{path}, layer {layer}: made for other inverse frequencies than the model's (up to {worst:.1e} of their "
            "size apart): another rotary base or scaling"
        )


def _fill(path: Any, spectral: Any, tensors: Mapping[str, Tensor]) -> None:
    parameters = dict(spectral.spectral.named_parameters())
    if parameters.keys() != tensors.keys():
        missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
        raise IncompatibleCheckpoint(f"{path}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}")
    for name, parameter in parameters.items():
        saved = tensors[name]
        if saved.shape != parameter.shape:
            raise IncompatibleCheckpoint(
                f"{path}: {name} is {tuple(saved.shape)}, but {tuple(parameter.shape)} (rows, pairs) in this model"
            )
        if not bool(torch.isfinite(saved).all()):
            raise IncompatibleCheckpoint(f"{path}: {name} has values that are not finite")
        with torch.no_grad():
            parameter.copy_(saved)


def save_folder(model: Any, folder: str | os.PathLike[str], plain: Any | None) -> None:
    """Write spectral parameters to `model.safetensors`, the name of the base to `spectral_config.json`.

    With `plain`, a model whose weights have been trained too, it is saved in the folder `base`. A base that is a folder
    is named relative to `folder`. All is written before anything is replaced.

    Raises:
        OSError: a full disk; the message names the file, and what the folder held stays.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=path) as unfinished:
        partial = Path(unfinished)
        with naming_file(path / _WEIGHTS):
            (partial / _WEIGHTS).write_bytes(_content(model))
        if plain is not None:
            with naming_file(path / _BASE), _naming_weights(path / _BASE):
                plain.save_pretrained(partial / _BASE)
        config = json.dumps(_base_named(model, path, plain is not None), indent=2) + "\n"
        with naming_file(path / SPECTRAL_CONFIG):
            (partial / SPECTRAL_CONFIG).write_text(config, encoding="utf-8")
        # The config comes last, since a folder without it is not loaded: parameters never meet another save's base.
        (path / SPECTRAL_CONFIG).unlink(missing_ok=True)
        shutil.rmtree(path / _BASE, ignore_errors=True)
        for name in (_WEIGHTS, _BASE, SPECTRAL_CONFIG):
            if (partial / name).exists():
                os.replace(partial / name, path / name)


@contextlib.contextmanager
def _naming_weights(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        raise OSError(f"cannot write the weights in {folder}: {error}") from error


def _base_named(model: Any, folder: Path, saved_beside: bool) -> dict[str, Any]:
    """Return the content of `spectral_config.json`. A revision is that of a hub name: files of a folder have none."""
    name = _BASE if saved_beside else model.config._name_or_path or None
    if name is None or not (saved_beside or os.path.isdir(name)):
        return {"base_model_name_or_path": name, "revision": None if name is None else model.config._commit_hash}
    if not saved_beside:
        name = os.path.realpath(name)
        with contextlib.suppress(ValueError):  # on another drive there is no relative path
            name = Path(os.path.relpath(name, os.path.realpath(folder))).as_posix()
    return {"base_model_name_or_path": name, "revision": None, "relative_to": _THIS_FOLDER}


def load_claimed(given: Any, **options: Any) -> Any:
    """Return the TransformerLens model of a spectral Hugging Face model, or of the `Source` of a folder of one.

    That of an object has copies of its weights and parameters; that of a folder is its base with the folder's spectral
    parameters. `options` are those of `load_model`.

    Raises:
        TypeError: another spectral model.
        IncompatibleCheckpoint: the folder names no base.
        TlspectralError, OSError, ValueError: as `load_model`, with the names of folder and base.
    """
    if isinstance(given, Source):
        return _load_folder(given, options)
    if not is_spectral_object(given):
        raise TypeError(f"this {type(given).__name__} is a spectral TransformerLens model already: use it as it is")
    spectral = to_spectral(load_model(plain_object(given), **options), **_options(layers_of(given)))
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
    if config.get("relative_to") == _THIS_FOLDER or (name == _BASE and (folder / _BASE).is_dir()):
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
