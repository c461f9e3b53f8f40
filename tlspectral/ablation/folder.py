"""The folder of a sweep that can be continued: one file per layer and part, and what all of them were made with."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from tlspectral.attention import AttentionView, stored_bytes
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables import read_table, whole_file, write_table

_SETTINGS = "sweep.json"
_FORMAT = 1
# Between machines and numbers of threads a loss moves by 1e-6; hooks that were not there before move it by more.
_SAME_LOSS = 1e-4


@dataclass(frozen=True)
class SweepFolder:
    """A folder whose files were all made with the same weights, tokens and settings.

    Attributes:
        path: the folder.
        key: hash of weights, tokens and settings, which every file carries.
    """

    path: Path
    key: str

    def read(self, name: str) -> pd.DataFrame | None:
        """A finished piece, None where there is none yet.

        Raises:
            IncompatibleCheckpoint: the file belongs to another sweep, or is damaged.
        """
        file = self.path / f"{name}.parquet"
        if not file.exists():
            return None
        try:
            table = read_table(file)
        except ValueError as error:
            raise IncompatibleCheckpoint(f"{file} is not a piece of a sweep ({error}): remove it") from error
        if table.attrs.get("sweep") != self.key:
            raise IncompatibleCheckpoint(
                f"{file} was made with other weights, tokens or settings than {self.path / _SETTINGS} says: remove it, "
                "or choose another checkpoint_dir"
            )
        return table

    def write(self, name: str, table: pd.DataFrame) -> None:
        """Keep a finished piece; the file appears as a whole."""
        keyed = table.copy(deep=False)
        keyed.attrs = {**table.attrs, "sweep": self.key}
        write_table(keyed, self.path / f"{name}.parquet")


def open_folder(path: str | os.PathLike[str], settings: dict[str, Any], intact_loss: float) -> SweepFolder:
    """Make the folder, or check that the one that is there was made with the same settings.

    Args:
        path: the folder; its parent must exist or be makeable.
        settings: everything that the numbers depend on, as JSON.
        intact_loss: of the model as it is, with the hooks that are on it, which no hash of weights sees.

    Raises:
        IncompatibleCheckpoint: the folder holds a sweep of other weights, tokens or settings, or other files.
    """
    folder = Path(path)
    settings = json.loads(json.dumps({"format": _FORMAT, **settings}))
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    manifest = folder / _SETTINGS
    if not manifest.exists():
        if folder.exists() and any(folder.iterdir()):
            raise IncompatibleCheckpoint(f"{folder} holds files but no {_SETTINGS}: choose an empty or a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(manifest) as partial:
            partial.write_text(json.dumps({**settings, "intact_loss": intact_loss}, indent=1), encoding="utf-8")
        return SweepFolder(folder, key)
    try:
        found = json.loads(manifest.read_text(encoding="utf-8"))
        loss_before = float(found.pop("intact_loss"))
    except (ValueError, KeyError, AttributeError) as error:
        raise IncompatibleCheckpoint(f"{manifest} cannot be read ({error!r}): choose another folder") from error
    differing = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
    if differing:
        name = differing[0]
        raise IncompatibleCheckpoint(
            f"{folder} holds a sweep with other {', '.join(differing)} ({name}: {_short(found.get(name))} there, "
            f"{_short(settings.get(name))} now): choose another checkpoint_dir"
        )
    if not abs(loss_before - intact_loss) <= _SAME_LOSS * max(1.0, abs(loss_before)):
        raise IncompatibleCheckpoint(
            f"{folder} holds a sweep of this model at loss {loss_before:.6f} without ablation, now it is "
            f"{intact_loss:.6f}: were there other hooks on the model? Choose another checkpoint_dir"
        )
    return SweepFolder(folder, key)


def weights_digest(view: AttentionView) -> str:
    """Hash of all parameters of the model, names, shapes and types included."""
    digest = hashlib.sha256()
    for name, value in sorted(view.model.named_parameters(), key=lambda item: item[0]):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(stored_bytes(value))
    return digest.hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
