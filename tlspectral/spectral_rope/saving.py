"""Spectral parameters in a safetensors file, and in a folder with the name of the base; no weights of the model."""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from tlspectral.models.attention import attention_view
from tlspectral.spectral_rope.layers import layers_of
from tlspectral.spectral_rope.swapped import is_swapped
from tlspectral.tables.parquet import naming_file
from tlspectral.tables.whole_file import whole_file

SPECTRAL_CONFIG = "spectral_config.json"
"""Names the base of spectral parameters, whose folder holds no whole model."""

WEIGHTS = "model.safetensors"
BASE = "base"
FORMAT = "tlspectral.spectral_rope.1"
OPTIONS = ("scope", "log_omega", "shared_phase", "heads", "frequencies")
"""Arguments of `to_spectral` that give a model modules like those that were saved."""


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

    return save(tensors_of(model), metadata={"format": FORMAT, "spectral": json.dumps(record_of(model))})


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Return the spectral parameters of a model by layer, and its own inverse frequencies."""
    own = {f"{index}.theta": module.theta.detach().cpu().clone() for index, module in layers_of(model).items()}
    return own | {name: value.detach().cpu().contiguous() for name, value in model.spectral.named_parameters()}


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


def save_folder(model: Any, folder: str | os.PathLike[str], plain: Any | None) -> None:
    """Write spectral parameters to `model.safetensors`, the name of the base to `spectral_config.json`.

    With `plain`, a model whose weights have been trained too, it is saved in the folder `base`. A base that is a folder
    is named relative to `folder`. All is written before anything is replaced.

    Raises:
        OSError: a full disk; the message names the file, and what the folder held stays.
    """
    from safetensors import SafetensorError

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", suffix=".part", dir=path) as unfinished:
        partial = Path(unfinished)
        config = json.dumps(_base_named(model, path, plain is not None), indent=2) + "\n"
        for file, content in ((WEIGHTS, _content(model)), (SPECTRAL_CONFIG, config.encode())):
            with naming_file(path / file):
                (partial / file).write_bytes(content)
        if plain is not None:
            with naming_file(path / BASE):
                try:
                    plain.save_pretrained(partial / BASE)
                except SafetensorError as error:
                    raise OSError(f"cannot write the weights in {path / BASE}: {error}") from error
        # The config comes last, since a folder without it is not loaded: parameters never meet another save's base.
        (path / SPECTRAL_CONFIG).unlink(missing_ok=True)
        shutil.rmtree(path / BASE, ignore_errors=True)
        for name in (WEIGHTS, BASE, SPECTRAL_CONFIG):
            if (partial / name).exists():
                os.replace(partial / name, path / name)


def _base_named(model: Any, folder: Path, saved_beside: bool) -> dict[str, Any]:
    """Return the content of `spectral_config.json`. A revision is that of a hub name: files of a folder have none."""
    name = BASE if saved_beside else model.config._name_or_path or None
    if name is None or not (saved_beside or os.path.isdir(name)):
        return {"base_model_name_or_path": name, "revision": None if name is None else model.config._commit_hash}
    if not saved_beside:
        name = os.path.realpath(name)
        with contextlib.suppress(ValueError):  # on another drive there is no relative path
            name = Path(os.path.relpath(name, os.path.realpath(folder))).as_posix()
    return {"base_model_name_or_path": name, "revision": None, "relative_to": "this folder"}
