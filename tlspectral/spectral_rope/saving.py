"""Spectral parameters in a safetensors file, and in a folder with the name of the base or its weights.

A save never replaces a model: neither the base's own folder nor another that holds one. The base is named where the
model of that name has the weights of the one that is saved; else its weights are stored in the folder `base`.
"""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import TlspectralError, warn_caller
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.hub import pinned
from tlspectral.models.loading.pretrained import find_tokenizer, load_pretrained
from tlspectral.models.loading.weight_files import NAMES, files_state, held_model, names_in
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.checkpoint_weights import checkpoint_weights
from tlspectral.spectral_rope.spectral_layers import layers_of
from tlspectral.spectral_rope.swapped import is_swapped
from tlspectral.spectral_rope.weights_identity import IDENTITY, as_tensor, identity_of, plain_weights, weights_digest
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.parquet import naming_file

SPECTRAL_CONFIG = "spectral_config.json"
"""Names the base of spectral parameters, whose folder holds no whole model."""

BASE = "base"
"""Folder of the base's weights, where they are not the weights of a model that has a name."""

FORMAT = "tlspectral.spectral_rope.2"

HOOKED_CONFIG = "spectral_hooked_config.json"
"""Config of a `SpectralHookedTransformer`, whose folder holds the whole model."""

HOOKED_FORMAT = "tlspectral.spectral_hooked_transformer.1"
OPTIONS = ("scope", "log_omega", "shared_phase", "heads", "frequencies")
"""Arguments of `to_spectral` that give a model modules like those that were saved."""

_WEIGHTS = "model.safetensors"
# Beside weights, whose files the index names too: transformers' Trainer reads `model.safetensors` first, and alone.
_BESIDE_WEIGHTS = "spectral_parameters.safetensors"
_INDEX = "model.safetensors.index.json"


def save_spectral(model: Any, path: str | os.PathLike[str]) -> None:
    """Write the spectral parameters of a model, and the options that they were made with, to a safetensors file.

    The weights are not in it: `load_spectral` takes a model that has them, and refuses another. A warning says if they
    are no longer the weights of the model that `to_spectral` was given.

    Args:
        model: what `to_spectral` or `SpectralHookedTransformer` made.
        path: of the file; an older file of spectral parameters is replaced as a whole. Its names are
            `{layer}.omega` (or `.log_omega_shift`), `.phase`, `.gain`; `.theta`, the model's own inverse frequencies,
            and what else the rotation depends on; and `base`, a digest of the weights and log-probabilities as JSON.

    Raises:
        TypeError: not a spectral model.
        FileExistsError: another file is at `path`, or the folder holds a model whose weights a file of that name is.
        FileNotFoundError: the folder does not exist.
        OSError: the disk is full; the message names `path`, and an older file there stays.
    """
    layers_of(model)
    path = Path(path).expanduser()
    if path.is_file() and not is_spectral_file(path):
        raise FileExistsError(f"{path} is no file of spectral parameters, and is not replaced: give another name")
    held = _held_model(path.parent)
    if path.name in NAMES and held is not None:
        raise FileExistsError(
            f"{path.parent} holds a model ({held.name}), of which {path.name} would be the weights: give another name"
        )
    base = getattr(model, "base", None)
    if base is not None and not _equal(plain_weights(model), plain_weights(base)):
        warn_caller(
            f"the weights of this {type(model).__name__} are no longer those of its base, and {path} holds spectral "
            "parameters alone, which will ask for a model with these weights: keep them too, by state_dict() or, of a "
            "model of transformers, by save_pretrained"
        )
    content = _content(model, identity_of(model))
    with naming_file(path), whole_file(path) as partial:
        partial.write_bytes(content)


def is_spectral_file(path: Path) -> bool:
    """Return whether a file holds spectral parameters and no weights, of this or another version."""
    return _has_format(path, FORMAT)


def spectral_file_of(path: Path) -> Path | None:
    """Return the file of spectral parameters that `path` is, or that the folder `path` holds; None without one."""
    held = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return next((file for file in held if is_spectral_file(file)), None)


def is_whole_hooked_file(path: Path) -> bool:
    """Return whether a file holds a whole `SpectralHookedTransformer`, of this or another version."""
    return _has_format(path, HOOKED_FORMAT)


def _has_format(path: Path, ours: str) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return str((file.metadata() or {}).get("format")).startswith(ours.rstrip("0123456789"))
    except (SafetensorError, OSError):
        return False


def parameters_file(folder: Path) -> Path:
    """Return the file of spectral parameters of a folder of `save_folder`."""
    beside = folder / _BESIDE_WEIGHTS
    return beside if beside.is_file() else folder / _WEIGHTS


def _content(model: Any, identity: dict[str, Any]) -> bytes:
    from safetensors.torch import save

    tensors = tensors_of(model) | {IDENTITY: as_tensor(identity)}
    return save(tensors, metadata={"format": FORMAT, "spectral": json.dumps(record_of(model))})


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return the spectral parameters of a model by layer, and what else their rotation depends on."""
    return {name: value.detach().cpu().clone().contiguous() for name, value in model.spectral.state_dict().items()}


def record_of(model: Any) -> dict[str, Any]:
    """Return the shape of a spectral model and the arguments of `to_spectral` that give modules like its, as JSON."""
    layers = {str(index): module for index, module in layers_of(model).items()}
    first = next(iter(layers.values()))
    pairs = first.query_mask.any(0)
    text = model.config.get_text_config() if is_swapped(model) else None  # a model of transformers
    return {
        "n_layers": attention_view(model).n_layers if text is None else int(text.num_hidden_layers),
        "n_heads": {index: module.n_heads for index, module in layers.items()},
        "n_kv_heads": {index: module.n_kv_heads for index, module in layers.items()},
        **{name: getattr(first, name) for name in OPTIONS[:3]},
        "heads": [
            [int(index), head]
            for index, module in layers.items()
            for head in module.query_mask.any(1).nonzero().flatten().tolist()
        ],
        "frequencies": None if bool(pairs.all()) else pairs.nonzero().flatten().tolist(),
    }


def save_folder(model: Any, folder: str | os.PathLike[str], plain: Callable[[], Any], *, trains_weights: bool) -> None:
    """Write spectral parameters, and the name of the base to `spectral_config.json`.

    Weights that train, or are not the weights of the model that the base's name means, are written beside, in folder
    `base`: `plain` gives the model without spectral parameters. A base that is a folder is named relative to `folder`.
    All is written before anything is replaced.

    Raises:
        FileExistsError: the folder is the base's, or holds a model, or `base` in it is not of an earlier save.
        OSError: a full disk; the message names the file, and what the folder held stays.
    """
    from safetensors import SafetensorError

    path, name = Path(folder).expanduser(), model.config._name_or_path or None
    revision = None if name is None or os.path.isdir(name) else getattr(model.config, "_commit_hash", None)
    _require_free(path, name)
    identity = identity_of(model)
    beside = trains_weights or name is None or _digest_of_named(name, revision) != identity["sha256"]
    base_is_inside = name is not None and _is_same(name, path / BASE)
    if beside:
        _require_free_base(path, base_is_inside)
    identity["stored"] = beside
    config = {"sha256": identity["sha256"], **_base_named(BASE if beside else str(name), revision, path, beside)}
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=path) as unfinished:
        partial = Path(unfinished)
        parameters = _BESIDE_WEIGHTS if beside else _WEIGHTS
        if beside:
            with naming_file(path / BASE):
                try:
                    # By the names of the model itself, which a Trainer loads.
                    plain().save_pretrained(partial / BASE, save_original_format=False)
                except SafetensorError as error:
                    raise OSError(f"cannot write the weights in {path / BASE}: {error}") from error
                if (tokenizer := _tokenizer_of(name, revision, model.config)) is not None:
                    tokenizer.save_pretrained(partial / BASE)
        files = {parameters: _content(model, identity), SPECTRAL_CONFIG: f"{json.dumps(config, indent=2)}\n".encode()}
        if beside:
            files[_INDEX] = _index(model, partial / BASE)
        for file, content in files.items():
            with naming_file(path / file):
                (partial / file).write_bytes(content)
        # The config comes last, since a folder without it is not loaded: parameters never meet another save's base.
        stored_before = _stores_base(path)
        (path / SPECTRAL_CONFIG).unlink(missing_ok=True)
        for file in (_WEIGHTS, _BESIDE_WEIGHTS, _INDEX):
            (path / file).unlink(missing_ok=True)
        if stored_before and not base_is_inside:
            os.replace(path / BASE, partial / "before")
        for file in (parameters, _INDEX, BASE, SPECTRAL_CONFIG):
            if (partial / file).exists():
                os.replace(partial / file, path / file)


def _require_free(folder: Path, base: str | None) -> None:
    if base is not None and _is_same(base, folder):
        raise FileExistsError(
            f"{folder} is the folder of the base, which a save there would destroy: save to another folder"
        )
    held = _held_model(folder)
    if held is not None:
        raise FileExistsError(
            f"{folder} holds a model ({held.name}), which a save of spectral parameters there would destroy: save to "
            "another folder, or take the model away first"
        )


def _require_free_base(folder: Path, base_is_inside: bool) -> None:
    if base_is_inside:
        raise FileExistsError(
            f"{folder / BASE} is the folder of the base, which a save of other weights to {folder} would destroy: save "
            "to another folder"
        )
    if (folder / BASE).exists() and not _stores_base(folder):
        raise FileExistsError(
            f"{folder / BASE}, where the weights are to be stored, is not of an earlier save of spectral parameters: "
            "save to another folder"
        )


def _held_model(folder: Path) -> Path | None:
    """Return a file by which a folder holds a model that no save of spectral parameters wrote."""
    of_a_save = (_INDEX,) if _stores_base(folder) else ()
    held = (file for file in held_model(folder) if file.name not in of_a_save)
    return next((file for file in held if not is_spectral_file(file)), None)


def _is_same(one: str, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(one, other)
    return False


def _stores_base(folder: Path) -> bool:
    """Return whether `base` in a folder is of a save there."""
    try:
        named = json.loads((folder / SPECTRAL_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return False
    return named == BASE and (folder / BASE).is_dir()


def _digest_of_named(name: str, revision: str | None) -> str | None:
    """Return the digest of the weights that `load_model` reads by a name; None where it reads no checkpoint."""
    try:
        source = find_source(name, revision)
        if not source.streams:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if source.kind == "hub":
                return _digest_of_files(name, revision, None)
            return _digest_of_files(os.path.realpath(name), None, files_state(source))
    except (TlspectralError, OSError, ValueError, ImportError):
        return None


@lru_cache(maxsize=8)
def _digest_of_files(name: str, revision: str | None, state: str | None) -> str:
    # Any tokenizer keeps the folder's from being read.
    model, _, _ = load_pretrained(find_source(name, revision), torch.float32, tokenizer=())
    return weights_digest(checkpoint_weights(model))


def _tokenizer_of(name: str | None, revision: str | None, config: Any) -> Any:
    try:
        source = None if name is None else find_source(name, revision)
        if source is None or not source.streams:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source, folder = pinned(source) if source.kind == "hub" else (source, Path(source.location))
            return find_tokenizer(source, folder, config)
    except (TlspectralError, OSError, ValueError, ImportError):
        return None


def _index(model: Any, base: Path) -> bytes:
    """Return an index of the files of spectral parameters and weights, which transformers' Trainer loads one by one."""
    files = dict.fromkeys(tensors_of(model), _BESIDE_WEIGHTS)
    for file in sorted(base.glob("*.safetensors")):
        files |= dict.fromkeys(names_in(file), f"{BASE}/{file.name}")
    return json.dumps({"metadata": {}, "weight_map": files}, indent=2).encode()


def _equal(weights: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return weights.keys() == others.keys() and all(
        value.dtype == others[name].dtype and torch.equal(value, others[name].to(value.device))
        for name, value in weights.items()
    )


def _base_named(name: str, revision: str | None, folder: Path, stored: bool) -> dict[str, Any]:
    """Return how `spectral_config.json` names a base. A revision belongs to a hub name: files of a folder have none."""
    if not (stored or os.path.isdir(name)):
        return {"base_model_name_or_path": name, "revision": revision}
    if not stored:
        name = os.path.realpath(name)
        with contextlib.suppress(ValueError):  # on another drive there is no relative path
            name = Path(os.path.relpath(name, os.path.realpath(folder))).as_posix()
    return {"base_model_name_or_path": name, "revision": None, "relative_to": "this folder"}
