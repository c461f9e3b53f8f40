"""The folder of an experiment that can be continued: one file per finished run, which may hold several tables."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from joblib import Parallel, delayed
from tqdm.auto import tqdm

from tlspectral.nulls import one_thread
from tlspectral.tables import PieceFolder, open_pieces
from tlspectral.version import __version__


@dataclass(frozen=True)
class RunFolder:
    """A folder whose runs were all made with the same settings.

    Attributes:
        pieces: the folder, a piece per run.
        provenance: what goes into `attrs` of every table: command, versions.
    """

    pieces: PieceFolder
    provenance: dict[str, Any]

    def read(self, name: str) -> dict[str, pd.DataFrame] | None:
        """The tables of a finished run, None where it is not finished. Raises IncompatibleCheckpoint."""
        joined = self.pieces.read(name)
        if joined is None:
            return None
        # A column that only empty tables have was not written, so reindex in place of a selection.
        return {
            table: joined.loc[joined["table"] == table]
            .reindex(list(columns), axis="columns")
            .astype(columns)
            .reset_index(drop=True)
            for table, columns in joined.attrs["tables"].items()
        }

    def write(self, name: str, tables: dict[str, pd.DataFrame], *, seed: int) -> None:
        """Keep the tables of a finished run, one below the other; the file appears as a whole."""
        columns = {
            key: {str(column): str(kind) for column, kind in table.dtypes.items()} for key, table in tables.items()
        }
        filled = [table.assign(table=key) for key, table in tables.items() if len(table)]
        joined = pd.concat(filled, ignore_index=True)
        joined.attrs = {**self.provenance, "run": name, "seed": seed, "tables": columns}
        self.pieces.write(name, joined)


def open_run_folder(path: Path, settings: dict[str, Any], *, command: str) -> RunFolder:
    """Make the folder, or check that the one that is there was made with the same settings and versions of torch.

    Args:
        path: the folder; its parents are made if needed.
        settings: everything that the numbers depend on, as JSON.
        command: that makes them, for the record.

    Raises:
        IncompatibleCheckpoint: the folder holds runs of other settings or versions, or other files.
    """
    # What rounds differently: a run of another torch would not be identical. Our own version is for the record alone.
    rounding = {name: version for name, version in versions().items() if name != "tlspectral"}
    pieces = open_pieces(path, {"settings": settings, "versions": rounding})
    return RunFolder(pieces, {"command": command, "versions": versions()})


def finish_runs(
    folder: RunFolder,
    runs: dict[str, tuple[int, Callable[[], dict[str, pd.DataFrame]]]],
    *,
    n_jobs: int = 1,
    show_progress: bool = False,
) -> dict[str, dict[str, pd.DataFrame]]:
    """Tables of all runs: those that are in the folder are read, the others made, each on one thread.

    Args:
        folder: where each run is kept as soon as it is finished.
        runs: by name, the seed and what makes the tables.
        n_jobs: processes; the tables do not depend on it.
        show_progress: a bar over the runs that are not there yet.
    """
    missing = [name for name in runs if folder.read(name) is None]
    work = Parallel(n_jobs=n_jobs, return_as="generator_unordered")(
        delayed(_finish)(folder, name, *runs[name]) for name in missing
    )
    for _ in tqdm(work, total=len(missing), desc="runs", unit="run", leave=False, disable=not show_progress):
        pass
    found = {name: folder.read(name) for name in runs}
    return {name: tables for name, tables in found.items() if tables is not None}


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    return {"tlspectral": __version__, "python": platform.python_version(), "torch": version("torch")}


def _finish(folder: RunFolder, name: str, seed: int, make: Callable[[], dict[str, pd.DataFrame]]) -> None:
    # Sums are split by thread: one thread everywhere gives the same last digits on any number of processes.
    with one_thread():
        tables = make()
    folder.write(name, tables, seed=seed)
