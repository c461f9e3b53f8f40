"""A resumable folder of long work: one file per finished job, and a manifest with the settings of them all.

Several processes may share a folder. A manifest or job that one of them has finished is never replaced by another.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.atomic_writes import remove_left_overs, whole_file
from tlspectral.tables.parquet import naming_file, read_table, table_bytes

_FORMAT = 4  # it rises with the names of settings, and with the columns of jobs
_MANIFEST = "settings.json"
_OWN_ATTRS = ("file", "given", "made_with")  # `given` holds the table's attrs that have one of these names


@dataclass(frozen=True)
class ResumeFolder:
    """A folder of job files that were all made with the same settings.

    Attributes:
        path: the folder.
        key: hash of the settings, which every file carries.
        noted: values that were stored beside the settings when the folder was made.
    """

    path: Path
    key: str
    noted: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> pd.DataFrame | None:
        """Read the table of a finished job, with the `attrs` that `write` was given; None if it has no file yet.

        Raises:
            IncompatibleCheckpoint: the file was made with other settings, belongs to another job, or is damaged.
        """
        file = self.path / f"{name}.parquet"
        if not file.exists():
            return None
        try:
            table = read_table(file)
        except ValueError as error:
            raise IncompatibleCheckpoint(
                f"{file} is no finished job that can be read ({error}), or remove it, so that it is made again"
            ) from error
        if table.attrs.get("made_with") != self.key:
            raise IncompatibleCheckpoint(
                f"{file} was made with other settings than {self.path / _MANIFEST} says: remove it, or choose "
                "another folder"
            )
        if table.attrs.get("file") != name:
            raise IncompatibleCheckpoint(
                f"{file} holds {table.attrs.get('file', 'a job without a name')}: another job was copied there, or "
                "an earlier version wrote it; remove it"
            )
        own_attrs = {key: table.attrs.pop(key, {}) for key in _OWN_ATTRS}
        table.attrs |= own_attrs["given"]
        return table

    def write(self, name: str, table: pd.DataFrame) -> bool:
        """Write the file of a finished job, which appears when it is complete. An OSError names the file.

        Returns:
            Whether the file holds this table. If another process finished the job first, its file stays: True if that
            is equal to the byte.
        """
        file = self.path / f"{name}.parquet"
        keyed = table.copy(deep=False)
        given = {key: table.attrs[key] for key in _OWN_ATTRS if key in table.attrs}
        keyed.attrs = {**table.attrs, "file": name, "given": given, "made_with": self.key}
        # pandas would give all rows of a dataset the attrs of its first file.
        data = table_bytes(keyed, attrs_for_pandas=False)
        # Not beside the finished jobs, of which others read the folder as it is.
        with naming_file(file), whole_file(file, replace=False, unfinished_in=self.path) as partial:
            partial.write_bytes(data)
        return file.read_bytes() == data


def open_resume_folder(
    path: str | os.PathLike[str], settings: dict[str, Any], *, noted: dict[str, Any] | None = None
) -> ResumeFolder:
    """Make the folder, or check that an existing one was made with the same settings.

    Where several processes make it at once, one writes the manifest, and the others are compared with it.
    Unfinished files that dead processes left in it are removed.

    Args:
        path: the folder; missing parents are made.
        settings: everything that the numbers depend on, as JSON.
        noted: values stored beside the settings and not compared. An existing folder's are returned.

    Raises:
        ValueError: `path` is a file, or a link to nothing.
        IncompatibleCheckpoint: the folder was made with other settings or by another version, or holds other files.
            Hidden files are ignored, and so is a manifest that was cut off before any job was written.
    """
    folder = Path(path).expanduser()
    if folder.is_symlink() and not folder.exists():
        raise ValueError(
            f"folder={str(path)!r} is a link to {os.readlink(folder)}, which does not exist: make it, or name another"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={str(path)!r} is a file: name a folder, which keeps one file per finished job")
    settings = json.loads(json.dumps({"format": _FORMAT, **settings}))
    noted = {} if noted is None else noted
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    file = folder / _MANIFEST
    stored = _read_manifest(file)
    if stored is not None and stored.get("format") != _FORMAT:
        raise IncompatibleCheckpoint(f"{folder} was written by {_other_version(stored.get('format'))}")
    for replace in (False, True):  # another process's file stays; one that was cut off is replaced
        if stored is None:
            folder.mkdir(parents=True, exist_ok=True)
            with naming_file(file), whole_file(file, replace=replace) as partial:
                partial.write_text(json.dumps({**settings, **noted}, indent=1), encoding="utf-8")
            stored = _read_manifest(file)
    if stored is None:
        raise IncompatibleCheckpoint(f"{file} cannot be read as soon as it is written: choose another folder")
    lacking = [name for name in noted if name not in stored]
    noted_before = {name: stored.pop(name) for name in noted if name in stored}
    differing = sorted(name for name in {*stored, *settings} if stored.get(name) != settings.get(name))
    if differing:
        name = differing[0]
        raise IncompatibleCheckpoint(
            f"{folder} was made with other {', '.join(differing)} ({name}: {_short(stored.get(name))} there, "
            f"{_short(settings.get(name))} now): choose another folder"
        )
    if lacking:
        raise IncompatibleCheckpoint(f"{file} cannot be read (it lacks {', '.join(lacking)}): choose another folder")
    remove_left_overs(folder)
    return ResumeFolder(folder, key, noted_before)


def _read_manifest(file: Path) -> dict[str, Any] | None:
    """Return the manifest. None for an empty folder, or one that holds only a damaged manifest."""
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
        stored = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        if not others:
            return None
        raise IncompatibleCheckpoint(f"{file} cannot be read ({error!r}): choose another folder") from error
    if not isinstance(stored, dict):
        raise IncompatibleCheckpoint(
            f"{file} cannot be read (it holds a {type(stored).__name__}, not settings by name): choose another folder"
        )
    return stored


def _other_version(found: Any) -> str:
    """Return the end of a message about a folder of another format: what wrote it, and what to do."""
    if isinstance(found, int) and found > _FORMAT:
        return (
            f"a newer version of tlspectral (format {found}; this version has {_FORMAT}): upgrade tlspectral, or "
            "choose another folder"
        )
    return "an older version: remove it, or choose another folder"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
