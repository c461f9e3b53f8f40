"""A spectral Hugging Face model as a folder: its spectral parameters in one file, and where its base is."""

import json
import os
from pathlib import Path
from typing import Any

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.models.loading import load_model
from tlspectral.models.loading.source import Source
from tlspectral.models.loading.weight_files import SPECTRAL_CONFIG
from tlspectral.spectral_rope.storage import WEIGHTS, load_spectral, save_spectral

_BASE = "base"


def save_folder(model: Any, folder: str | os.PathLike[str], plain: Any | None) -> None:
    """Write spectral parameters to `model.safetensors`, the name of the base to `spectral_config.json`.

    With `plain`, a model whose weights have been trained too, it is saved in the folder `base`.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_spectral(model, path / WEIGHTS)
    if plain is not None:
        plain.save_pretrained(path / _BASE)
    name = _BASE if plain is not None else model.config._name_or_path or None
    # Files of a folder have no revision, whatever they were copied from.
    commit = None if name is None or plain is not None or os.path.isdir(name) else model.config._commit_hash
    base = {"base_model_name_or_path": name, "revision": commit}
    (path / SPECTRAL_CONFIG).write_text(json.dumps(base, indent=2) + "\n", encoding="utf-8")


def load_folder(source: Source, **options: Any) -> Any:
    """Return the TransformerLens model of a folder's base, with the folder's spectral parameters.

    `options` are those of `load_model`. Raises as it does, and IncompatibleCheckpoint where no base is named.
    """
    folder = Path(source.location)
    config = json.loads((folder / SPECTRAL_CONFIG).read_text(encoding="utf-8"))
    name, revision = config["base_model_name_or_path"], config["revision"]
    if name is None:
        raise IncompatibleCheckpoint(
            f"{folder / SPECTRAL_CONFIG} names no base model: it was made from a model object that came from no folder "
            "or hub; load the base, and give it to load_spectral with this folder"
        )
    base = load_model(folder / _BASE if (folder / _BASE).is_dir() else name, revision=revision, **options)
    spectral = load_spectral(base, folder)
    spectral.rotated.tlspectral_source = {**base.tlspectral_source, **source.record, "base": base.tlspectral_source}
    return spectral
