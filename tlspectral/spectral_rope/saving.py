"""Spectral models in a file of `spectral_file`, or in a folder with a config that says where the weights are.

A save never replaces another model: neither the base's own folder, nor one of another class or shape, nor files that no
earlier save wrote. The base is named where the model of that name has the weights of the one that is saved; else its
weights are stored in the folder `base`.
"""

import contextlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tlspectral.errors import IncompatibleCheckpoint, TlspectralError, warn_caller
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.hub import pinned
from tlspectral.models.loading.pretrained import find_tokenizer, load_pretrained
from tlspectral.models.loading.weight_files import INDEX, NAMES, WHOLE, files_state, held_model, names_in
from tlspectral.models.reading.checkpoint_weights import checkpoint_weights
from tlspectral.spectral_rope.spectral_file import (
    FORMAT,
    HOOKED,
    holds_parameters,
    options_of,
    record_in,
    require_format,
    tensors_of,
    write_file,
)
from tlspectral.spectral_rope.spectral_layers import layers_of
from tlspectral.spectral_rope.weights_identity import IDENTITY, identity_of, plain_weights, weights_digest
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.parquet import naming_file

SPECTRAL_CONFIG = "spectral_config.json"
"""Config of a folder: the class of the model, the files of the save, and the base of spectral parameters alone."""

BASE = "base"
"""Folder of the base's weights, where they are not the weights of a model that has a name."""

# Beside weights, whose files the index names too: transformers' Trainer reads `model.safetensors` first, and alone.
_BESIDE_WEIGHTS = "spectral_parameters.safetensors"

ROTARY_TABLES = (".attn.rotary_sin", ".attn.rotary_cos")
"""How names of the tables of rotary positions in a HookedTransformer end."""


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
    if path.is_file() and not holds_parameters(path):
        raise FileExistsError(f"{path} is no file of spectral parameters, and is not replaced: give another name")
    held = next((file for file in held_model(path.parent) if not holds_parameters(file)), None)
    if path.name in NAMES and held is not None:
        raise FileExistsError(
            f"{path.parent} holds a model ({held.name}), of which {path.name} would be the weights: give another name"
        )
    identity, base = identity_of(model), getattr(model, "base", None)
    if base is not None and weights_digest(plain_weights(base)) != identity["sha256"]:
        warn_caller(
            f"the weights of this {type(model).__name__} are no longer those of its base, and {path} holds spectral "
            "parameters alone, which will ask for a model with these weights: keep them too, by state_dict() or, of a "
            "model of transformers, by save_pretrained"
        )
    with naming_file(path), whole_file(path) as partial:
        write_file(partial, path, tensors_of(model), options_of(model), identity)


def save_folder(
    model: Any,
    folder: str | os.PathLike[str],
    file: str,
    tensors: Mapping[str, Tensor],
    record: Mapping[str, Any],
    identity: Mapping[str, Any],
    *,
    beside: Callable[[Path], None],
    base: Mapping[str, Any] | None = None,
    keep: tuple[Path, ...] = (),
) -> None:
    """Write a file of a spectral model to a folder, what `beside` writes there, and the config.

    All is written before anything is replaced, and the config comes last. Where one file alone changes, as in a save of
    a whole model over an earlier one, that is one step. `base` is what the config says of the base; `keep` are folders
    of it that stay.

    Raises:
        FileExistsError: the folder holds another model, or a file of that name that no earlier save wrote.
        OSError: a full disk; the message names the file, and what the folder held stays.
    """
    path, name = Path(folder).expanduser(), type(model).__name__
    earlier = _files_of_earlier_save(path, name, file, tensors, record)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=path) as unfinished:
        partial = Path(unfinished)
        beside(partial)
        write_file(partial / file, path / file, tensors, record, identity)
        files = sorted(at.name for at in partial.iterdir())
        changed = [each for each in files if each == file or not _equal_files(partial / each, path / each)]
        other = next((path / each for each in changed if (path / each).exists() and each not in {*earlier, file}), None)
        if other is not None:
            raise FileExistsError(
                f"{other}, which a save there would replace, is not of an earlier save: save to another folder"
            )
        config = {"format": FORMAT, "model": name, **(base or {}), "files": files}
        with naming_file(path / SPECTRAL_CONFIG):
            (partial / SPECTRAL_CONFIG).write_text(f"{json.dumps(config, indent=2)}\n", encoding="utf-8")
        gone = [path / each for each in earlier if each not in files and path / each not in keep]
        gone += [path / each for each in changed if (path / each).is_dir()]
        if gone or len(changed) > 1 or not _equal_files(partial / SPECTRAL_CONFIG, path / SPECTRAL_CONFIG):
            # Spectral parameters without a config are not loaded, so that they never meet another save's base.
            (path / SPECTRAL_CONFIG).unlink(missing_ok=True)
            changed.append(SPECTRAL_CONFIG)
        (before := partial / ".before").mkdir()
        for each in gone:
            if each.exists():
                os.replace(each, before / each.name)
        for each in changed:
            os.replace(partial / each, path / each)


def save_with_base(
    model: Any, folder: str | os.PathLike[str], plain: Callable[[], Any], *, trains_weights: bool
) -> None:
    """Write spectral parameters of a model of transformers, and the name of the base to the config.

    Weights that train, or are not the weights of the model that the base's name means, are written beside, in folder
    `base`: `plain` gives the model without spectral parameters. A base that is a folder is named relative to `folder`.

    Raises as `save_folder`; FileExistsError also for the folder of the base.
    """
    path, name = Path(folder).expanduser(), model.config._name_or_path or None
    revision = None if name is None or os.path.isdir(name) else getattr(model.config, "_commit_hash", None)
    _require_not_base(name, path)
    identity, tensors = identity_of(model), tensors_of(model)
    stored = trains_weights or name is None or _digest_of_named(name, revision) != identity["sha256"]
    if stored:
        _require_not_base(name, path / BASE)
    identity["stored"] = stored

    def write_base(partial: Path) -> None:
        if not stored:
            return
        try:
            with naming_file(path / BASE):
                # By the names of the model itself, which a Trainer loads.
                plain().save_pretrained(partial / BASE, save_original_format=False)
                if (tokenizer := _tokenizer_of(name, revision, model.config)) is not None:
                    tokenizer.save_pretrained(partial / BASE)
        except SafetensorError as error:
            raise OSError(f"cannot write the weights in {path / BASE}: {error}") from error
        with naming_file(path / INDEX):
            (partial / INDEX).write_bytes(_index(tensors, partial / BASE))

    base = {"sha256": identity["sha256"], **_base_named(BASE if stored else str(name), revision, path, stored)}
    file = _BESIDE_WEIGHTS if stored else WHOLE
    keep = (path / BASE,) if _is_same(name, path / BASE) else ()
    save_folder(model, path, file, tensors, options_of(model), identity, beside=write_base, base=base, keep=keep)


def _require_not_base(name: str | None, folder: Path) -> None:
    if _is_same(name, folder):
        raise FileExistsError(
            f"{folder} is the folder of the base, which a save there would destroy: save to another folder"
        )


def _is_same(name: str | None, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return name is not None and os.path.samefile(name, folder)
    return False


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the config of a folder, None where there is none.

    Raises IncompatibleCheckpoint for one that is damaged, of another version or of something else.
    """
    path = folder / SPECTRAL_CONFIG
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IncompatibleCheckpoint(f"{path} is no config of a spectral model: {error!r}") from error
    if not isinstance(config, dict):
        raise IncompatibleCheckpoint(f"{path} is no config of a spectral model: it holds no object")
    require_format(path, config.get("format"))
    return config


def parameters_file(folder: Path) -> Path:
    """Return the file of a spectral model in a folder of `save_folder`."""
    beside = folder / _BESIDE_WEIGHTS
    return beside if beside.is_file() else folder / WHOLE


def _files_of_earlier_save(
    folder: Path, name: str, file: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]
) -> list[str]:
    """Return the names of what an earlier save to a folder wrote. Raises FileExistsError where it holds another model.

    Files of spectral parameters alone may lie beside.
    """
    try:
        config = read_config(folder) or {"model": name}
    except IncompatibleCheckpoint:
        config = {}
    named = config.get("files")
    files = [str(each) for each in named if Path(str(each)).name == each != ".."] if isinstance(named, list) else []
    held = [folder / SPECTRAL_CONFIG] if config.get("model") != name else []
    for at in held_model(folder):
        of_this = _is_of(at, tensors, record) if at.name == file else holds_parameters(at)
        if not (at.name in files if at.suffix == ".json" else of_this):
            held.append(at)
    if held:
        raise FileExistsError(
            f"{folder} holds another model ({held[0].name}), which a save there would destroy: save to another folder"
        )
    return files


def _is_of(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> bool:
    """Return whether a file holds an earlier state of a model: of a whole one, the same shapes and options."""
    held = record_in(path)
    if held is None or (HOOKED in held) != (HOOKED in record):
        return False
    if HOOKED not in record:
        return True
    with safe_open(path, framework="pt") as file:
        shapes = {each: tuple(file.get_slice(each).get_shape()) for each in file.keys()}  # noqa: SIM118 - not a mapping
    # Rotary tables are as long as the longest run.
    same = shapes.keys() == {*tensors, IDENTITY} and all(
        tuple(value.shape) == shapes[each] for each, value in tensors.items() if not each.endswith(ROTARY_TABLES)
    )
    return same and {**held, HOOKED: None} == {**record, HOOKED: None}


def _equal_files(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and one.read_bytes() == other.read_bytes()


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


def _index(tensors: Mapping[str, Tensor], base: Path) -> bytes:
    """Return an index of the files of spectral parameters and weights, which transformers' Trainer loads one by one."""
    files = dict.fromkeys(tensors, _BESIDE_WEIGHTS)
    for file in sorted(base.glob("*.safetensors")):
        files |= dict.fromkeys(names_in(file), f"{BASE}/{file.name}")
    return json.dumps({"metadata": {}, "weight_map": files}, indent=2).encode()


def _base_named(name: str, revision: str | None, folder: Path, stored: bool) -> dict[str, Any]:
    """Return how `spectral_config.json` names a base. A revision belongs to a hub name: files of a folder have none."""
    if not (stored or os.path.isdir(name)):
        return {"base_model_name_or_path": name, "revision": revision}
    if not stored:
        name = os.path.realpath(name)
        with contextlib.suppress(ValueError):  # on another drive there is no relative path
            name = Path(os.path.relpath(name, os.path.realpath(folder))).as_posix()
    return {"base_model_name_or_path": name, "revision": None, "relative_to": "this folder"}
