"""A `SpectralHookedTransformer` in a folder: one file with all weights and spectral parameters, its config beside.

The file of weights holds the config too, so that files of two saves are told apart, and is replaced in one step.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tlspectral.errors import BadWeights, IncompatibleCheckpoint
from tlspectral.models.loading.damage import first_sentence
from tlspectral.models.loading.packaged import hooked_transformer_class
from tlspectral.models.loading.weight_files import held_model
from tlspectral.models.reading.digests import digest_of_named
from tlspectral.spectral_rope.saving import (
    HOOKED_CONFIG,
    HOOKED_FORMAT,
    OPTIONS,
    SPECTRAL_CONFIG,
    is_spectral_file,
    is_whole_hooked_file,
    record_of,
)
from tlspectral.spectral_rope.weights_identity import plain_weights, probe_of
from tlspectral.tables.parquet import naming_file

WEIGHTS = "model.safetensors"
NOT_KEPT = ("device", "n_devices")
"""Fields of the config that belong to a machine and not to the model."""

_MADE_ANEW = (".attn.mask", ".attn.IGNORE")
_TABLES = (".attn.rotary_sin", ".attn.rotary_cos")


@dataclass(frozen=True)
class Saved:
    """What a folder holds: `config` as its JSON, tensors by their names in the state dict, and the probe."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    probe: dict[str, Any]


def save_hooked(model: Any, folder: str | os.PathLike[str]) -> None:
    """Write a `SpectralHookedTransformer` and its tokenizer to a folder, from which `load_model` loads it.

    `model.safetensors` holds weights, rotary tables and spectral parameters; `spectral_hooked_config.json` the config
    and the options. All is written before anything is replaced, and a file that would not change stays. So a save over
    an earlier one of the same config is one step.

    Raises as `SpectralHookedTransformer.save_pretrained`.
    """
    path = Path(folder).expanduser()
    tensors = _stored_tensors(model)
    config: dict[str, Any] = {"format": HOOKED_FORMAT, "hooked_transformer": _fields_of(model.cfg)}
    config["spectral"] = {name: value for name, value in record_of(model).items() if name in OPTIONS}
    plain = {name: value for name, value in tensors.items() if not name.startswith("spectral.")}
    if differing := differing_shapes(plain, _plain_shapes(config["hooked_transformer"])):
        raise ValueError(
            f"this {type(model).__name__} cannot be saved, since its config makes other tensors: {differing}; keep it "
            "by state_dict()"
        )
    not_finite = next((name for name, value in tensors.items() if not bool(torch.isfinite(value).all())), None)
    if not_finite is not None:
        raise BadWeights(f"{not_finite} has values that are not finite, so the model is not saved to {path}")
    earlier = _require_free(path, config["spectral"], _shapes(tensors))
    probe = probe_of(model, plain_weights(model))
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=path) as unfinished:
        partial = Path(unfinished)
        config["tokenizer"] = _write_tokenizer(getattr(model, "tokenizer", None), partial, path)
        _require_own_tokenizer(path, partial, config["tokenizer"], earlier)
        text = json.dumps(config, indent=2)
        with naming_file(path / HOOKED_CONFIG):
            (partial / HOOKED_CONFIG).write_text(f"{text}\n", encoding="utf-8")
        metadata = {"format": HOOKED_FORMAT, "config": text, "probe": json.dumps(probe)}
        metadata["sha256"] = _digest(tensors, metadata)
        _write_weights(tensors, metadata, partial / WEIGHTS, path / WEIGHTS)
        for file in (*config["tokenizer"], WEIGHTS, HOOKED_CONFIG):
            if file == WEIGHTS or not _equal_files(partial / file, path / file):
                os.replace(partial / file, path / file)
        for file in {*earlier} - {*config["tokenizer"]}:
            (path / file).unlink(missing_ok=True)


def read_saved(folder: Path) -> Saved:
    """Return what `save_hooked` wrote to a folder.

    Raises FileNotFoundError without the weights; IncompatibleCheckpoint, which names the file, for a config or weights
    that are damaged, of another version or of two saves.
    """
    from safetensors import SafetensorError, safe_open

    config, file = _read_config(folder / HOOKED_CONFIG), folder / WEIGHTS
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds {HOOKED_CONFIG} and no {WEIGHTS}: copy the whole folder")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            # Copies, since the file may be replaced while the model is in use.
            tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise IncompatibleCheckpoint(f"{file} is not a safetensors file: {error}") from error
    _require_format(file, metadata.get("format"))
    _require_whole(file, tensors, metadata)
    inside = json.loads(metadata["config"])
    if _as_text(inside) != _as_text(config):  # True and 1 are equal as values
        raise IncompatibleCheckpoint(
            f"{folder / HOOKED_CONFIG} and {file} are of two saves, or one was edited: "
            f"{', '.join(_differing(inside, config))} differ; save the model again"
        )
    return Saved(config, tensors, json.loads(metadata["probe"]))


def made_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a save as HookedTransformer takes it, so that nothing is drawn, seeded or fetched."""
    dtype = getattr(torch, config["dtype"])
    return {**config, "dtype": dtype, "device": "cpu", "seed": None, "init_weights": False, "tokenizer_name": None}


def stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor that a save holds of a model."""
    return _shapes(_without_what_is_made_anew(model))


def differing_shapes(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> str:
    """Return which tensors are missing, unknown or of another shape, as text; empty where none is."""
    missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unknown:
        return f"missing {missing[:4] or 'nothing'}, unknown {unknown[:4] or 'nothing'}"
    found = _shapes(tensors)
    return next(
        (f"{name} is {found[name]}, expected {expected[name]}" for name in found if found[name] != expected[name]), ""
    )


def _stored_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors of a model that a save holds, on the CPU, none of which shares memory with another."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in _without_what_is_made_anew(model).items():
        stored = value.detach().cpu().contiguous()
        place = stored.untyped_storage().data_ptr()
        tensors[name] = (
            stored.clone() if place in seen or stored.nbytes != stored.untyped_storage().nbytes() else stored
        )
        seen.add(place)
    return tensors


def _without_what_is_made_anew(model: Any) -> dict[str, Tensor]:
    # Qwen 1's tables depend on the length of the last run.
    made = (*_MADE_ANEW, *_TABLES) if getattr(model.cfg, "use_dynamic_ntk_rope", False) else _MADE_ANEW
    return {name: value for name, value in model.state_dict().items() if not name.endswith(made)}


def _plain_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the stored shapes of the HookedTransformer that a config makes."""
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HookedTransformer is deprecated", DeprecationWarning)
        return stored_shapes(hooked_transformer_class()(made_config(config), move_to_device=False))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: _shape(name, value.shape) for name, value in tensors.items()}


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a shape, of rotary tables without their rows: a long run makes them longer, and TransformerLens loads
    those of its own length."""
    return tuple(shape)[name.endswith(_TABLES) :]


def _fields_of(cfg: Any) -> dict[str, Any]:
    """Return a config as JSON. Raises ValueError for a value that JSON does not hold, such as a function."""
    known = {field.name for field in fields(cfg)}
    kept = {}
    for name, value in vars(cfg).items():
        if name in NOT_KEPT:
            continue
        kept[name] = str(value).removeprefix("torch.") if name == "dtype" else value
        if name not in known or not _is_plain(kept[name]):
            raise ValueError(
                f"cfg.{name} is {value!r}, which a config file does not hold: numbers, texts, lists of them and None "
                "in the fields of HookedTransformerConfig are kept"
            )
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _require_free(folder: Path, options: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the tokenizer's files of an earlier save, where a folder holds one or nothing.

    Raises FileExistsError for a folder that holds another model.
    """
    weights, config = folder / WEIGHTS, folder / HOOKED_CONFIG
    held = [file for file in held_model(folder) if file.name == WEIGHTS or not is_spectral_file(file)]
    other = next((file for file in held if file != weights or not is_whole_hooked_file(file)), None)
    if other is None and (folder / SPECTRAL_CONFIG).exists():
        other = folder / SPECTRAL_CONFIG
    if other is not None:
        raise FileExistsError(
            f"{folder} holds another model ({other.name}), which a save there would destroy: save to another folder"
        )
    try:
        earlier = _read_config(config) if config.exists() else {}
    except IncompatibleCheckpoint as error:
        raise FileExistsError(f"{config} is not replaced: {error}") from error
    if weights.exists():
        _require_same_model(weights, options, shapes)
    files = earlier.get("tokenizer", [])
    return [name for name in files if isinstance(name, str) and Path(name).name == name]


def _require_same_model(weights: Path, options: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    from safetensors import safe_open

    with safe_open(weights, framework="pt") as file:
        names = list(file.keys())
        found = {name: _shape(name, file.get_slice(name).get_shape()) for name in names}
        config = file.metadata().get("config", "")
    try:
        before = json.loads(config)["spectral"]
    except (ValueError, KeyError, TypeError):
        before = None
    if found != shapes or before != options:
        raise FileExistsError(
            f"{weights.parent} holds another SpectralHookedTransformer, of other shapes or options, which a save there "
            "would destroy: save to another folder"
        )


def _write_tokenizer(tokenizer: Any, partial: Path, folder: Path) -> list[str]:
    """Write a tokenizer to a folder of unfinished files, and return the names of its files."""
    if tokenizer is None:
        return []
    try:
        with naming_file(folder):
            tokenizer.save_pretrained(partial)
    except Exception as error:  # the tokenizers package raises plain Exception for a full disk
        if isinstance(error, OSError):
            raise
        raise OSError(f"cannot write the tokenizer to {folder}: {first_sentence(error)}") from error
    return sorted(file.name for file in partial.iterdir() if file.is_file())


def _require_own_tokenizer(folder: Path, partial: Path, names: list[str], earlier: list[str]) -> None:
    for name in names:
        if name not in earlier and (folder / name).exists() and not _equal_files(partial / name, folder / name):
            raise FileExistsError(
                f"{folder / name}, where the tokenizer is to be stored, is not of an earlier save: save to another "
                "folder"
            )


def _write_weights(tensors: dict[str, Tensor], metadata: dict[str, str], partial: Path, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        with naming_file(path):
            save_file(tensors, partial, metadata)
    except SafetensorError as error:
        raise OSError(f"cannot write the weights to {path}: {error}") from error


def _equal_files(one: Path, other: Path) -> bool:
    return other.is_file() and one.read_bytes() == other.read_bytes()


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        parts = {name: config[name] for name in ("hooked_transformer", "spectral")}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IncompatibleCheckpoint(f"{path} is no config of a SpectralHookedTransformer: {error!r}") from error
    _require_format(path, config.get("format"))
    if not all(isinstance(part, dict) for part in parts.values()):
        raise IncompatibleCheckpoint(f"{path} is no config of a SpectralHookedTransformer: its parts are no objects")
    return config


def _require_format(path: Path, found: Any) -> None:
    if found == HOOKED_FORMAT:
        return
    known = str(found).startswith(HOOKED_FORMAT.rstrip("0123456789"))
    what = "was saved by another version of tlspectral" if known else "is of no saved SpectralHookedTransformer"
    advice = ": install that version" if known else "; its save_pretrained writes them"
    raise IncompatibleCheckpoint(f"{path} {what} (format {found!r}, expected {HOOKED_FORMAT!r}){advice}")


def _as_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _differing(inside: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """Return the names of fields that differ between two configs."""
    one, other = ({**each, **each["hooked_transformer"], **each["spectral"]} for each in (inside, config))
    names = {*one, *other} - {"hooked_transformer", "spectral"}
    return sorted(name for name in names if _as_text(one.get(name)) != _as_text(other.get(name)))


def _digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Return the SHA-256 of tensors and of what the metadata says of them."""
    parts = (digest_of_named(tensors), metadata.get("config"), metadata.get("probe"))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _require_whole(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    for name, value in tensors.items():
        if not bool(torch.isfinite(value).all()):
            raise IncompatibleCheckpoint(f"{file}: {name} has values that are not finite")
    found, written = _digest(tensors, metadata), metadata.get("sha256", "")
    if found != written:
        raise IncompatibleCheckpoint(
            f"{file} does not hold what was saved (SHA-256 {found[:12]}, {written[:12] or 'none'} when it was "
            "written): copy it again, or save the model again"
        )
