"""The folder of an experiment that can be continued: one file per finished run, which may hold several tables."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from tlspectral.algebra.nulls import one_thread
from tlspectral.models.loading import usable_device
from tlspectral.tables.job import Job
from tlspectral.tables.measurement import bundled, finished_jobs, unbundled
from tlspectral.tables.resume_folder import ResumeFolder, open_resume_folder
from tlspectral.version import __version__


@dataclass(frozen=True)
class RunFolder:
    """A folder whose runs were all made with the same settings.

    Attributes:
        parts: the folder, with one part file per run.
        provenance: command and versions, for `attrs` of every table.
        device: where the runs are trained.
    """

    parts: ResumeFolder
    provenance: dict[str, Any]
    device: str = "cpu"


def open_run_folder(path: Path, settings: dict[str, Any], *, command: str, device: str = "cpu") -> RunFolder:
    """Make the folder, or check that an existing one was made with the same settings and versions.

    Args:
        path: the folder; its parents are made if needed.
        settings: everything that the numbers depend on, as JSON.
        command: recorded in `attrs` of every table.
        device: where the runs are trained.

    Raises:
        IncompatibleCheckpoint: the folder holds runs of other settings, versions or kind of device, or other files.
        ValueError: there is no such device here.
    """
    elsewhere = device_setting(device)
    # Another torch rounds differently, so its runs would not be identical. Our own version is recorded, not compared.
    rounding = {name: version for name, version in versions().items() if name != "tlspectral"}
    parts = open_resume_folder(path, {"settings": settings, "versions": rounding, **elsewhere})
    return RunFolder(parts, {"command": command, "versions": versions(), **elsewhere}, device)


def device_setting(device: str) -> dict[str, str]:
    """Return the kind of device as a setting of a folder; none for the CPU.

    Another kind rounds differently, so its runs are not those of the CPU.

    Raises:
        ValueError: there is no such device here.
    """
    kind = usable_device(device).type
    return {} if kind == "cpu" else {"device": kind}


def finish_runs(
    folder: RunFolder,
    runs: dict[str, tuple[int, Callable[[], dict[str, pd.DataFrame]]]],
    *,
    store: bool = True,
    n_jobs: int = 1,
) -> dict[str, dict[str, pd.DataFrame]]:
    """Return the tables of all runs: finished ones are read from the folder, the others made, each on one thread.

    Args:
        folder: where each run is written as soon as it is finished.
        runs: by name, the seed and the function that makes the tables.
        store: whether to write the tables that are made. False where runs may be unfinished: they are only returned.
        n_jobs: processes; the tables do not depend on it.
    """
    parts = [
        Job(name, partial(_bundled_run, {**folder.provenance, "run": name, "seed": seed}, make))
        for name, (seed, make) in runs.items()
    ]
    stored = {} if store else {name: table for name in runs if (table := folder.parts.read(name)) is not None}
    finished = stored | finished_jobs(
        [part for part in parts if part.name not in stored],
        folder.parts if store else None,
        description="runs",
        unit="run",
        n_jobs=n_jobs,
    )
    return {name: unbundled(finished[name]) for name in runs}


def versions() -> dict[str, str]:
    """Versions that the numbers depend on."""
    return {"tlspectral": __version__, "python": platform.python_version(), "torch": version("torch")}


def _bundled_run(attrs: dict[str, Any], make: Callable[[], dict[str, pd.DataFrame]]) -> pd.DataFrame:
    # Sums are split by thread: one thread everywhere gives the same last digits on any number of processes.
    with one_thread():
        run = bundled(make())
    run.attrs = {**attrs, **run.attrs}
    return run
