"""A folder from which long work resumes: a file per finished job, and a manifest with the settings of all jobs.

Several processes may share a folder. A process never replaces a manifest or job that another process has finished.
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

_FORMAT = 4  # raise it when names of settings or columns of jobs change
_MANIFEST = "settings.json"
_OWN_ATTRS = ("file", "given", "made_with")  # `given` holds the table's attrs that have one of these names


@dataclass(frozen=True)
class ResumeFolder:
    """A folder of job files that were all made with the same settings; `open_resume_folder` makes it.

    Attributes:
        path: the folder.
        key: hash of the settings, which every file contains.
        noted: values that were stored beside the settings when the folder was made.
    """

    path: Path
    key: str
    noted: dict[str, Any] = field(default_factory=dict)

    def read(self, name: str) -> pd.DataFrame | None:
        """Return the table of the finished job `name`, with the `attrs` that it was written with, or None if it has no
        file yet.

        Raises:
            IncompatibleCheckpoint: the file has other settings, belongs to another job, or is damaged.
        """
        file = self.path / f"{name}.parquet"
        if not file.exists():
            return None
        try:
            table = read_table(file)
        except ValueError as error:
            raise IncompatibleCheckpoint(
                f"{file} cannot be read as a finished job ({error}): remove the file, and the job is made again"
            ) from error
        if table.attrs.get("made_with") != self.key:
            raise IncompatibleCheckpoint(
                f"{file} was made with other settings than {self.path / _MANIFEST}: remove the file, or choose another "
                "folder"
            )
        if table.attrs.get("file") != name:
            raise IncompatibleCheckpoint(
                f"{file} holds {table.attrs.get('file', 'a job without a name')}, another job or a file of an earlier "
                "version: remove the file, and the job is made again"
            )
        own_attrs = {key: table.attrs.pop(key, {}) for key in _OWN_ATTRS}
        table.attrs |= own_attrs["given"]
        return table

    def write(self, name: str, table: pd.DataFrame) -> bool:
        """Write the table of a finished job to its file, which appears when it is complete. An OSError names the file.

        Returns:
            True if the file holds this table. If another process finished the job first, its file stays, and the result
            is True only if that file is equal byte by byte.
        """
        file = self.path / f"{name}.parquet"
        keyed = table.copy(deep=False)
        given = {key: table.attrs[key] for key in _OWN_ATTRS if key in table.attrs}
        keyed.attrs = {**table.attrs, "file": name, "given": given, "made_with": self.key}
        # Without attrs for pandas, which would give all rows of a dataset the attrs of its first file.
        data = table_bytes(keyed, attrs_for_pandas=False)
        # The unfinished file stays in this folder, because other programs read the job files' own folder meanwhile.
        with naming_file(file), whole_file(file, replace=False, unfinished_in=self.path) as partial:
            partial.write_bytes(data)
        return file.read_bytes() == data


def open_resume_folder(
    path: str | os.PathLike[str], settings: dict[str, Any], *, noted: dict[str, Any] | None = None
) -> ResumeFolder:
    """Make a folder for finished jobs, or check that an existing folder was made with the same settings; return it as a
    `ResumeFolder`.

    If several processes make it at once, one process writes the manifest (the file with the settings), and the others
    compare their settings with it. Unfinished files of dead processes are removed.

    Args:
        path: the folder; missing parents are made.
        settings: everything that the numbers depend on, as JSON.
        noted: values to store in the manifest that are not compared. For an existing folder the result has the stored
            values.

    Raises:
        ValueError: `path` is a file, or a link to a folder that does not exist.
        IncompatibleCheckpoint: the folder has other settings, comes from another version, or holds other files. Hidden
            files are ignored. A manifest that was cut off before any job was written is replaced.
    """
    folder = Path(path).expanduser()
    if folder.is_symlink() and not folder.exists():
        raise ValueError(
            f"folder={str(path)!r} is a link to {os.readlink(folder)}, which does not exist: make that folder, or give "
            "another"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"folder={str(path)!r} is a file: give a folder, which will hold a file per finished job")
    settings = json.loads(json.dumps({"format": _FORMAT, **settings}))
    noted = {} if noted is None else noted
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    file = folder / _MANIFEST
    stored = _read_manifest(file)
    if stored is not None and stored.get("format") != _FORMAT:
        raise IncompatibleCheckpoint(f"{folder} was written by {_other_version(stored.get('format'))}")
    for replace in (False, True):  # the manifest of another process stays; a manifest that was cut off is replaced
        if stored is None:
            folder.mkdir(parents=True, exist_ok=True)
            with naming_file(file), whole_file(file, replace=replace) as partial:
                partial.write_text(json.dumps({**settings, **noted}, indent=1), encoding="utf-8")
            stored = _read_manifest(file)
    if stored is None:
        raise IncompatibleCheckpoint(f"{file} was written and cannot be read back: choose another folder")
    lacking = [name for name in noted if name not in stored]
    noted_before = {name: stored.pop(name) for name in noted if name in stored}
    differing = sorted(name for name in {*stored, *settings} if stored.get(name) != settings.get(name))
    if differing:
        name = differing[0]
        raise IncompatibleCheckpoint(
            f"{folder} was made with other {', '.join(differing)} ({name}: {_short(stored.get(name))} there, "
            f"{_short(settings.get(name))} now): use the same settings, or choose another folder"
        )
    if lacking:
        raise IncompatibleCheckpoint(f"{file} cannot be read (it lacks {', '.join(lacking)}): choose another folder")
    remove_left_overs(folder)
    return ResumeFolder(folder, key, noted_before)


def _read_manifest(file: Path) -> dict[str, Any] | None:
    """Return the settings in a folder's manifest `file` as a dict; None if the folder is empty or holds only a damaged
    manifest.

    Raises IncompatibleCheckpoint if the folder holds other files but no manifest that can be read.
    """
    other_files = file.parent.is_dir() and any(
        entry.name != file.name and not entry.name.startswith(".") for entry in file.parent.iterdir()
    )
    if not file.exists():
        if other_files:
            raise IncompatibleCheckpoint(
                f"{file.parent} holds files but no {file.name}: choose an empty or a new folder"
            )
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        if not other_files:
            return None
        raise IncompatibleCheckpoint(f"{file} cannot be read ({error!r}): choose another folder") from error
    if not isinstance(stored, dict):
        raise IncompatibleCheckpoint(
            f"{file} cannot be read (it holds a {type(stored).__name__}, not settings by name): choose another folder"
        )
    return stored


def _other_version(stored_format: Any) -> str:
    """Return the end of a message about a folder of another format: which version wrote it, and what to do.
    `stored_format` is the format in its manifest.
    """
    if isinstance(stored_format, int) and stored_format > _FORMAT:
        return (
            f"a newer version of tlspectral (format {stored_format}; this version has {_FORMAT}): upgrade tlspectral, "
            "or choose another folder"
        )
    return "an older version: remove it, or choose another folder"


def _short(value: Any) -> str:
    """Return the value of a setting as JSON text of at most 40 characters."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
