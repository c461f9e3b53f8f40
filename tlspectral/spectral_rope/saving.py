"""Save spectral models: one file of parameters, or a folder whose config tells where the weights are.

A save never replaces another model: neither the base's own folder, nor a model of another class or shape, nor files
that no earlier save wrote. The base is named if the model with that name has the weights of the saved model. Otherwise
its weights are stored in the folder `base`.
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
from tlspectral.errors.settings import checked_settings
from tlspectral.models.loading.finding import find_source
from tlspectral.models.loading.hub import pinned
from tlspectral.models.loading.pretrained import find_tokenizer, load_pretrained
from tlspectral.models.loading.weight_files import INDEX, NAMES, WHOLE, files_state, held_model, names_in
from tlspectral.models.reading.checkpoint_weights import checkpoint_weights
from tlspectral.models.reading.packed import refuse_packed
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
"""Config of a folder: class of the model, files of the save and, for parameters alone, the base."""

BASE = "base"
"""Folder of the base's weights, if no model with a name has these weights."""

# Name of the parameters' file if weights are stored too. transformers' Trainer would read only `model.safetensors`.
# With another name it reads the index, which lists both files.
_BESIDE_WEIGHTS = "spectral_parameters.safetensors"

ROTARY_TABLES = (".attn.rotary_sin", ".attn.rotary_cos")
"""Ends of the names of rotary tables in a HookedTransformer."""


@checked_settings
def save_spectral(model: Any, path: str | os.PathLike[str]) -> None:
    """Write the spectral parameters and options of a model to a safetensors file, without the weights.

    Spectral parameters are the learned rotary frequencies, phases and gains. `load_spectral` puts them back into a
    model with the same weights.

    >>> import tlspectral as tls, tempfile
    >>> from tlspectral.spectral_rope import load_spectral, save_spectral
    >>> model = tls.load_model("tiny-rope")
    >>> file = f"{tempfile.mkdtemp()}/learned.safetensors"
    >>> save_spectral(tls.to_spectral(model), file)
    >>> spectral = load_spectral(model, file)

    Args:
        model: made by `tls.to_spectral` or `SpectralHookedTransformer`. A warning is given if its weights have changed
            since `to_spectral`.
        path: the file. An older file of spectral parameters is replaced. Its tensors are `{layer}.omega` (or
            `.log_omega_shift`), `.phase`, `.gain`, `.theta` (the model's own inverse frequencies), other settings of
            the rotation, and `base`: a digest of the weights and log-probabilities, as JSON.

    Returns:
        None; the file has been written.

    Raises:
        TypeError: the model is not spectral.
        FileExistsError: another file is at `path`, or the folder holds a model and a file of this name would be read as
            its weights.
        FileNotFoundError: the folder does not exist.
        OSError: the disk is full; the message names `path`, and an older file there stays.
    """
    layers_of(model)
    path = Path(path).expanduser()
    if path.is_file() and not holds_parameters(path):
        raise FileExistsError(
            f"{path} exists and is not a file of spectral parameters, so it is not replaced: give another name"
        )
    held = next((file for file in held_model(path.parent) if not holds_parameters(file)), None)
    if path.name in NAMES and held is not None:
        raise FileExistsError(
            f"{path.parent} holds a model ({held.name}), and {path.name} would be read as its weights: give another "
            "name"
        )
    identity, base = identity_of(model), getattr(model, "base", None)
    if base is not None and weights_digest(plain_weights(base)) != identity["sha256"]:
        warn_caller(
            f"the weights of this {type(model).__name__} have changed since it was made, and {path} holds spectral "
            "parameters alone; load_spectral will need a model with the changed weights: save them too, by "
            "state_dict() or, for a model of transformers, by save_pretrained"
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
    """Write the file of a spectral model, further files and the config (`spectral_config.json`) to a folder.

    Everything is written before anything is replaced, and the config comes last. If only one file changes, the save is
    one step.

    Args:
        model: the model; its class name goes into the config and the messages.
        folder: the folder; it is made if it does not exist.
        file: name of the model's file.
        tensors: tensors of this file. record: its options, as a dict. identity: from `identity_of`.
        beside: function that writes further files (such as a tokenizer) to the folder that it is given.
        base: entries of the config about the ordinary model that the parameters belong to; None for a whole model.
        keep: folders of an earlier save that are not removed, although the new config does not list them.

    Raises:
        FileExistsError: the folder holds another model, or a file of the same name that no earlier save wrote.
        OSError: a full disk; the message names the file, and the folder's earlier content stays.
    """
    path, name = Path(folder).expanduser(), type(model).__name__
    earlier = _files_of_earlier_save(path, name, file, tensors, record)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=path) as unfinished:
        partial = Path(unfinished)
        beside(partial)
        write_file(partial / file, path / file, tensors, record, identity)
        files = sorted(at.name for at in partial.iterdir())
        changed = [entry for entry in files if entry == file or not _equal_files(partial / entry, path / entry)]
        foreign = [path / entry for entry in changed if (path / entry).exists() and entry not in {*earlier, file}]
        if foreign:
            raise FileExistsError(
                f"{foreign[0]} would be replaced by this save, and no earlier save wrote it: save to another folder"
            )
        config = {"format": FORMAT, "model": name, **(base or {}), "files": files}
        with naming_file(path / SPECTRAL_CONFIG):
            (partial / SPECTRAL_CONFIG).write_text(f"{json.dumps(config, indent=2)}\n", encoding="utf-8")
        gone = [path / entry for entry in earlier if entry not in files and path / entry not in keep]
        gone += [path / entry for entry in changed if (path / entry).is_dir()]
        if gone or len(changed) > 1 or not _equal_files(partial / SPECTRAL_CONFIG, path / SPECTRAL_CONFIG):
            # The config is removed first: parameters without a config are not loaded, so a stopped save cannot combine
            # them with the base of another save.
            (path / SPECTRAL_CONFIG).unlink(missing_ok=True)
            changed.append(SPECTRAL_CONFIG)
        (before := partial / ".before").mkdir()
        for old in gone:
            if old.exists():
                os.replace(old, before / old.name)
        for entry in changed:
            os.replace(partial / entry, path / entry)


def save_with_base(
    model: Any, folder: str | os.PathLike[str], plain: Callable[[], Any], *, trains_weights: bool
) -> None:
    """Write a Hugging Face model's spectral parameters to a folder, with the name or the weights of its base.

    The base is the ordinary model with these weights. Its weights are stored in the subfolder `base` if they train, or
    if the model with the base's name has other weights. `model`: the spectral model. `plain`: function that returns the
    model without spectral parameters. `trains_weights`: True if weights train. A base that is a folder is named
    relative to `folder`.

    Raises FileExistsError for another model's folder or the base's own folder, BadWeights for quantised weights,
    OSError for a full disk.
    """
    keep = "which are not saved with spectral parameters: save these alone by save_spectral"
    refuse_packed(model, "save_pretrained", keep)
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
    """Raise FileExistsError if `folder` is the folder from which the underlying model (`name`) was loaded."""
    if _is_same(name, folder):
        raise FileExistsError(
            f"{folder} is the folder of the base, and a save there would destroy the base: save to another folder"
        )


def _is_same(name: str | None, folder: Path) -> bool:
    """Return True if `name`, a hub name or path of a model, is this folder, also through links."""
    with contextlib.suppress(OSError):
        return name is not None and os.path.samefile(name, folder)
    return False


def read_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of `spectral_config.json` in a folder as a dict, or None without this file.

    Raises IncompatibleCheckpoint if the config is damaged, of another version, or not written by a save.
    """
    path = folder / SPECTRAL_CONFIG
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IncompatibleCheckpoint(
            f"{path} is not a config of a spectral model ({error!r}): copy the folder again, or save the model again"
        ) from error
    if not isinstance(config, dict):
        raise IncompatibleCheckpoint(
            f"{path} is not a config of a spectral model, because it is not a JSON object: copy the folder again, or "
            "save the model again"
        )
    require_format(path, config.get("format"))
    return config


def parameters_file(folder: Path) -> Path:
    """Return the path of the safetensors file that a save wrote to a folder: spectral parameters, or a whole model."""
    beside = folder / _BESIDE_WEIGHTS
    return beside if beside.is_file() else folder / WHOLE


def _files_of_earlier_save(
    folder: Path, name: str, file: str, tensors: Mapping[str, Tensor], record: Mapping[str, Any]
) -> list[str]:
    """Return a list with the names of files that an earlier save of this model wrote to a folder, as its config lists
    them.

    `name`: class name of the model. `file`, `tensors`, `record`: name, tensors and options of the file to be written.
    Raises FileExistsError if the folder holds another model. Other files of spectral parameters may lie there.
    """
    try:
        config = read_config(folder) or {"model": name}
    except IncompatibleCheckpoint:
        config = {}
    listed = config.get("files")
    # Only names without a path: a damaged config must not reach files elsewhere.
    files = (
        [str(entry) for entry in listed if Path(str(entry)).name == entry != ".."] if isinstance(listed, list) else []
    )
    held = [folder / SPECTRAL_CONFIG] if config.get("model") != name else []
    for at in held_model(folder):
        of_this = _is_of(at, tensors, record) if at.name == file else holds_parameters(at)
        if not (at.name in files if at.suffix == ".json" else of_this):
            held.append(at)
    if held:
        raise FileExistsError(
            f"{folder} holds another model ({held[0].name}), and a save there would destroy it: save to another folder"
        )
    return files


def _is_of(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> bool:
    """Return True if the file at `path` is an earlier save of the same model.

    `tensors`, `record`: tensors and options of the new save. For a whole model, shapes of the tensors and options must
    agree; for spectral parameters, the file need only hold spectral parameters.
    """
    held = record_in(path)
    if held is None or (HOOKED in held) != (HOOKED in record):
        return False
    if HOOKED not in record:
        return True
    with safe_open(path, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a mapping
    # Rotary tables grow with the longest run, so their shapes are not compared.
    same = shapes.keys() == {*tensors, IDENTITY} and all(
        tuple(value.shape) == shapes[name] for name, value in tensors.items() if not name.endswith(ROTARY_TABLES)
    )
    return same and {**held, HOOKED: None} == {**record, HOOKED: None}


def _equal_files(new: Path, old: Path) -> bool:
    """Return whether two paths are files with equal content."""
    return new.is_file() and old.is_file() and new.read_bytes() == old.read_bytes()


def _digest_of_named(name: str, revision: str | None) -> str | None:
    """Return the SHA-256 (hex) of the weights that `load_model` reads for a model's name or folder; None if it finds no
    checkpoint or cannot read it.

    `revision`: of a model on the hub, or None.
    """
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
    """Return the SHA-256 (hex) of the weights of a hub model or folder, cached by the arguments.

    `revision`: of the hub model, or None. `state`: digest of the folder's files, so that changed files are read again;
    None for the hub.
    """
    # A given tokenizer, even an empty one, prevents reading the folder's tokenizer.
    model, _, _ = load_pretrained(find_source(name, revision), torch.float32, tokenizer=())
    return weights_digest(checkpoint_weights(model))


def _tokenizer_of(name: str | None, revision: str | None, config: Any) -> Any:
    """Return the tokenizer of the model with this name or folder; None if it has none or it cannot be read.

    `revision`: of a model on the hub, or None. `config`: the model's config, by which transformers finds some
    tokenizers.
    """
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
    """Return the bytes of an index file in JSON, which names for each tensor of spectral parameters and weights the
    file that holds it.

    transformers' Trainer reads it. `tensors`: the spectral parameters. `base`: folder of the weights.
    """
    files = dict.fromkeys(tensors, _BESIDE_WEIGHTS)
    for file in sorted(base.glob("*.safetensors")):
        files |= dict.fromkeys(names_in(file), f"{BASE}/{file.name}")
    return json.dumps({"metadata": {}, "weight_map": files}, indent=2).encode()


def _base_named(name: str, revision: str | None, folder: Path, stored: bool) -> dict[str, Any]:
    """Return a dict with the entries of `spectral_config.json` that name the underlying model: base_model_name_or_path,
    revision, and for a folder relative_to.

    `name`: hub name, folder, or name of the stored weights. `stored`: True if the weights are stored in the saved
    folder. Only a hub name keeps its `revision`. A folder is named relative to `folder` if possible.
    """
    if not (stored or os.path.isdir(name)):
        return {"base_model_name_or_path": name, "revision": revision}
    if not stored:
        name = os.path.realpath(name)
        with contextlib.suppress(ValueError):  # a path on another drive cannot be relative
            name = Path(os.path.relpath(name, os.path.realpath(folder))).as_posix()
    return {"base_model_name_or_path": name, "revision": None, "relative_to": "this folder"}
