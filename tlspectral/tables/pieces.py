"""The folder of long work that can be continued: one file per finished piece, and what all of them were made with."""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.parquet import naming_file, read_table, write_table
from tlspectral.tables.whole_file import whole_file

_FORMAT = 1


@dataclass(frozen=True)
class PieceFolder:
    """A folder whose files were all made with the same settings.

    Attributes:
        path: the folder.
        key: hash of the settings, which every file carries.
        manifest: name of the file that holds the settings.
        noted: what was noted beside the settings when the folder was made.
    """

    path: Path
    key: str
    manifest: str
    noted: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> pd.DataFrame | None:
        """A finished piece, None where there is none yet.

        Raises:
            IncompatibleCheckpoint: the file was made with other settings, or is damaged.
        """
        file = self.path / f"{name}.parquet"
        if not file.exists():
            return None
        try:
            table = read_table(file)
        except ValueError as error:
            raise IncompatibleCheckpoint(f"{file} is not a finished piece ({error}): remove it") from error
        if table.attrs.get("made_with") != self.key:
            raise IncompatibleCheckpoint(
                f"{file} was made with other settings than {self.path / self.manifest} says: remove it, or choose "
                "another folder"
            )
        if table.attrs.get("file") != name:
            raise IncompatibleCheckpoint(
                f"{file} holds {table.attrs.get('file', 'a part without a name')}: another part was copied there, or "
                "an earlier version wrote it; remove it"
            )
        return table

    def write(self, name: str, table: pd.DataFrame) -> None:
        """Keep a finished piece; the file appears as a whole. Raises OSError, with the file's name, if it cannot."""
        keyed = table.copy(deep=False)
        keyed.attrs = {**table.attrs, "made_with": self.key, "file": name}
        write_table(keyed, self.path / f"{name}.parquet")


def open_pieces(
    path: str | os.PathLike[str],
    settings: dict[str, Any],
    *,
    manifest: str = "settings.json",
    noted: dict[str, Any] | None = None,
) -> PieceFolder:
    """Make the folder, or check that the one that is there was made with the same settings.

    Args:
        path: the folder; its parent must exist or be makeable.
        settings: everything that the numbers depend on, as JSON.
        manifest: name of the file that holds them.
        noted: kept beside the settings and not compared; that of a folder which is there is returned as it was.

    Raises:
        IncompatibleCheckpoint: the folder was made with other settings, or holds other files. Hidden files do not
            count, nor does a manifest that was cut off before any piece was written.
    """
    folder = Path(path)
    settings = json.loads(json.dumps({"format": _FORMAT, **settings}))
    noted = {} if noted is None else noted
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    file = folder / manifest
    found = _read_manifest(file)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        with naming_file(file), whole_file(file) as partial:
            partial.write_text(json.dumps({**settings, **noted}, indent=1), encoding="utf-8")
        return PieceFolder(folder, key, manifest, noted)
    lacking = [name for name in noted if name not in found]
    if lacking:
        raise IncompatibleCheckpoint(f"{file} cannot be read (it lacks {', '.join(lacking)}): choose another folder")
    before = {name: found.pop(name) for name in noted}
    differing = sorted(name for name in {*found, *settings} if found.get(name) != settings.get(name))
    if differing:
        name = differing[0]
        raise IncompatibleCheckpoint(
            f"{folder} was made with other {', '.join(differing)} ({name}: {_short(found.get(name))} there, "
            f"{_short(settings.get(name))} now): choose another folder"
        )
    return PieceFolder(folder, key, manifest, before)


def _read_manifest(file: Path) -> dict[str, Any] | None:
    """The settings in a manifest, None where there are neither settings nor pieces yet."""
    others = file.parent.is_dir() and any(
        other.name != file.name and not other.name.startswith(".") for other in file.parent.iterdir()
    )
    if not file.exists():
        if others:
            raise IncompatibleCheckpoint(
                f"{file.parent} holds files but no {file.name}: choose an empty or a new folder"
            )
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        if not others:
            return None
        raise IncompatibleCheckpoint(f"{file} cannot be read ({error!r}): choose another folder") from error
    if not isinstance(found, dict):
        raise IncompatibleCheckpoint(
            f"{file} cannot be read (it holds a {type(found).__name__}, not settings by name): choose another folder"
        )
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
