"""A measurement: its schema, what its numbers depend on, its jobs and where finished ones are kept."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.job import Job, sharing
from tlspectral.tables.schema import Schema
from tlspectral.tables.work import finished_jobs

if TYPE_CHECKING:
    from tlspectral.tables.resume_folder import ResumeFolder

# Other machines and other numbers of threads change a score by 1e-6; other hooks change it by more.
_SAME_SCORE = 1e-4


@dataclass(frozen=True)
class Measurement:
    """One measurement, from its settings to its table.

    Use `first` for a job that the others need, such as a screen that chooses heads. What comes last, such as q-values
    over all jobs, is done on the joined frame before `table`.

    Attributes:
        schema: of the table.
        settings: what the numbers depend on, as JSON. They stand in the table's `attrs` and in the manifest of the
            folder. Workers, bars and the folder are none.
        origin: which model it is of, for `attrs`.
        identity: what else tells folders apart, as JSON: hashes of weights, of tokens and of the metric, which heads.
            Functions of no argument, such as a hash of all weights, are called where there is a folder.
        folder: where finished jobs are kept, each in a file; None keeps them in memory.
        score: computes the scores of the model as it stands, one per prompt. Hooks on a model change them, and no hash
            of weights shows hooks: a folder in which they were others is refused.
        n_jobs: workers that share the jobs, as joblib counts them.
    """

    schema: Schema
    settings: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    folder: str | os.PathLike[str] | None = None
    score: Callable[[], Iterable[float]] | None = None
    n_jobs: int = 1

    @cached_property
    def kept(self) -> "ResumeFolder | None":
        """The folder, made or compared with the settings. Raises IncompatibleCheckpoint."""
        if self.folder is None:
            return None
        from tlspectral.tables.resume_folder import open_resume_folder  # files are not loaded where nothing is kept

        noted = {} if self.score is None else {"intact_values": [float(value) for value in self.score()]}
        identity = {name: value() if callable(value) else value for name, value in self.identity.items()}
        opened = open_resume_folder(self.folder, {**self.settings, **identity}, noted=noted)
        for name, values in noted.items():
            _require_same_scores(opened.path, name, opened.noted[name], values)
        return opened

    def first(self, job: Job) -> pd.DataFrame:
        """Return the table of a job that the others need. Every shard that does not find it makes it."""
        with sharing(None):
            return self.made([job], description=job.name, unit="job")[job.name]

    def made(self, jobs: Iterable[Job], **how: Any) -> dict[str, pd.DataFrame]:
        """Return the table of every job, read from the folder or made; `how` is as for `finished_jobs`."""
        return finished_jobs(jobs, self.kept, n_jobs=self.n_jobs, **how)

    def table(self, frame: pd.DataFrame | Mapping[str, Any], **attrs: Any) -> pd.DataFrame:
        """Return the frame in the schema, with origin, settings and `attrs` in its `attrs`."""
        return self.schema.frame(frame, {**self.origin, **self.settings, **attrs})


def _require_same_scores(folder: Path, name: str, stored: Any, now: list[float]) -> None:
    """Compare scores of the model without ablation, prompt by prompt. Raises IncompatibleCheckpoint."""
    if (
        not isinstance(stored, list)
        or len(stored) != len(now)
        or not all(isinstance(value, float | int) for value in stored)
    ):
        raise IncompatibleCheckpoint(
            f"the manifest of {folder} cannot be read ({name} is {stored!r:.40}): choose another folder"
        )
    for prompt, (then, value) in enumerate(zip(stored, now, strict=True)):
        if not abs(then - value) <= _SAME_SCORE * max(1.0, abs(then)):
            raise IncompatibleCheckpoint(
                f"{folder} holds work on this model at score {then:.6f} of prompt {prompt} without ablation, now it is "
                f"{value:.6f}: were there other hooks on the model? Choose another folder"
            )
