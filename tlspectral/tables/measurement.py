"""A measurement: its schema, what its numbers depend on, and its jobs.

Jobs are shared among workers, stored one by one in a folder, resumed from there, and shown by a bar. Their tables are
put together at the end.
"""

import os
import pickle
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import pandas as pd
from joblib.externals.loky import get_reusable_executor

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.job import WORKER, Job, JobFailure, current_shard, sharing, working
from tlspectral.tables.meanings import MEANINGS, changes_of_function
from tlspectral.tables.progress import bar, without_bars
from tlspectral.tables.schema import Schema

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
        score: computes the scores of the model as it stands, one per prompt, or by the name of what each is of. Hooks
            on a model change them, and no hash of weights shows hooks: a folder in which they were others is refused.
        n_jobs: workers that share the jobs, as joblib counts them.
    """

    schema: Schema
    settings: Mapping[str, Any]
    origin: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    folder: str | os.PathLike[str] | None = None
    score: Callable[[], Iterable[float] | Mapping[str, float]] | None = None
    n_jobs: int = 1

    @cached_property
    def kept(self) -> "ResumeFolder | None":
        """The folder, made or compared with the settings. Raises IncompatibleCheckpoint."""
        if self.folder is None:
            return None
        from tlspectral.tables.resume_folder import open_resume_folder  # files are not loaded where nothing is kept

        noted = {} if self.score is None else {"intact_values": _as_json(self.score())}
        identity = {name: value() if callable(value) else value for name, value in self.identity.items()}
        if changes := changes_of_function(self.schema.name):  # no table has rows of two meanings
            identity[MEANINGS] = changes
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


def _as_json(scores: Iterable[float] | Mapping[str, float]) -> list[float] | dict[str, float]:
    if isinstance(scores, Mapping):
        return {str(name): float(value) for name, value in scores.items()}
    return [*map(float, scores)]


def _by_name(scores: Any) -> dict[str, Any]:
    """Return scores by the name of what they are of; of a list they are of prompts, of another value there are none."""
    if isinstance(scores, list):
        return {f"prompt {number}": value for number, value in enumerate(scores)}
    return scores if isinstance(scores, dict) else {}


def _require_same_scores(folder: Path, name: str, stored: Any, now: list[float] | dict[str, float]) -> None:
    """Compare scores of the model without ablation, one by one. Raises IncompatibleCheckpoint."""
    before, values = _by_name(stored), _by_name(now)
    if before.keys() != values.keys() or not all(isinstance(value, float | int) for value in before.values()):
        raise IncompatibleCheckpoint(
            f"the manifest of {folder} cannot be read ({name} is {stored!r:.40}): choose another folder"
        )
    for scored, value in values.items():
        then = before[scored]
        if not abs(then - value) <= _SAME_SCORE * max(1.0, abs(then)):
            raise IncompatibleCheckpoint(
                f"{folder} holds work on this model at score {then:.6f} of {scored} without ablation, now it is "
                f"{value:.6f}: were there other hooks on the model? Choose another folder"
            )


# --- work in jobs ---


def finished_jobs(
    jobs: Iterable[Job],
    folder: "ResumeFolder | None" = None,
    *,
    description: str,
    unit: str,
    prepare: Callable[[], Any] | None = None,
    n_jobs: int = 1,
    failed: Callable[[str, JobFailure], None] | None = None,
    done: Callable[[str], None] | None = None,
) -> dict[str, pd.DataFrame]:
    """Return the table of every job. A stored job is read from the folder, any other is made and stored at once.

    Several processes may do the same work in the same folder, and each may be killed at any moment. A job that another
    process has stored meanwhile is read. In a block of `shard` only the jobs of that shard are made.

    With `n_jobs=1` jobs are made in this process, one after the other. Else joblib shares them out: to the backend of
    `joblib.parallel_config` (threads, processes, Dask), by default to processes with one thread each, which end with
    this call (see `workers_kept`). Each worker stores its jobs itself. An interrupt, a job that cannot be written
    and, without `failed`, an error in a job stop the work. Finished jobs stay in the folder, and the KeyboardInterrupt
    says how many.

    Args:
        jobs: with names of their own. All files of a sequence are read and checked before the first missing job is
            made. Parts of any other iterable are taken one by one, and each is freed before the next is taken.
        folder: where finished jobs are stored; None keeps them in memory alone.
        description: of the bar.
        unit: of the bar, what `items` of a job are.
        prepare: called once in every process or thread that makes a job. It returns what all jobs need and what is
            too large to be sent with each of them. What it holds is sent once. A worker of a backend that the caller
            configured keeps the result until it is given other work or ends.
        n_jobs: workers, as joblib counts them.
        failed: called here with the name of a job that cannot be read, checked or made, and why. The rest goes on.
        done: called in this process with the name of a job that is stored or made.

    Returns:
        The tables by name, in the order of `jobs`, without those that failed.

    Raises:
        IncompatibleCheckpoint: a file of the folder does not belong to this work.
        MissingParts: jobs of other shards are not there; the jobs of this shard are.
        OSError: a job cannot be written; the message names the file.
    """
    share = current_shard()
    if share is not None:
        how: dict[str, Any] = {"prepare": prepare, "n_jobs": n_jobs, "failed": failed, "done": done}
        finish = partial(finished_jobs, folder=folder, description=description, unit=unit, **how)
        return share.tables(jobs, folder, finish)
    sizes: dict[str, int] = {}
    tables: dict[str, pd.DataFrame] = {}
    failures: set[str] = set()

    def note(name: str, failure: JobFailure) -> None:
        failures.add(name)
        if failed is not None:
            failed(name, failure)

    def take(name: str, table: pd.DataFrame) -> None:
        tables[name] = table
        if done is not None:
            done(name)

    missing, total = _missing(jobs, folder, sizes, take, None if failed is None else note), None
    if isinstance(jobs, Sequence):
        missing, total = list(missing), sum(job.items for job in jobs)
    goes_on = failed is not None
    if n_jobs != 1:
        missing = list(missing)
        if min(joblib.effective_n_jobs(n_jobs), len(missing)) <= 1:
            n_jobs = 1
    if isinstance(missing, list) and n_jobs != 1:
        made_parts = _made_by_workers(missing, folder, prepare, goes_on, n_jobs)
    else:
        made_parts = _made_here(missing, folder, prepare, goes_on)

    def finished_items() -> int:
        return sum(sizes[name] for name in (*tables, *failures))

    try:
        with bar(total, description, unit, initial=finished_items()) as shown, closing(made_parts):
            for name, made in made_parts:
                if isinstance(made, JobFailure):
                    note(name, made)
                else:
                    take(name, made)
                shown.update(finished_items() - shown.n)  # with those that were read in between
    except KeyboardInterrupt:
        # From None: the last line says it all, and where in a layer Ctrl-C came tells the user nothing.
        raise KeyboardInterrupt(_what_is_kept(finished_items(), total, unit, folder)) from None
    return {name: tables[name] for name in sizes if name in tables}


def _what_is_kept(finished: int, total: int | None, unit: str, folder: "ResumeFolder | None") -> str:
    if folder is None:
        return "stopped, and nothing is kept: with a folder for finished work the same call would go on from there"
    of_all = "" if total is None else f" of {total}"
    return f"stopped: {finished}{of_all} {unit}s are in {folder.path}; the same call goes on from there"


def stored_table(job: Job, folder: "ResumeFolder | None") -> pd.DataFrame | None:
    """Read a job that the folder has, and check it; None if there is none. Raises IncompatibleCheckpoint."""
    table = None if folder is None else folder.read(job.name)
    if table is not None and job.check is not None:
        job.check(table)
    return table


def _missing(
    jobs: Iterable[Job],
    folder: "ResumeFolder | None",
    sizes: dict[str, int],
    take: Callable[[str, pd.DataFrame], None],
    failed: Callable[[str, JobFailure], None] | None,
) -> Iterator[Job]:
    """Yield the jobs that the folder does not have. Add their `items` to `sizes`, and `take` the stored tables."""
    for job in jobs:
        sizes[job.name] = job.items
        try:
            table = stored_table(job, folder)
        except Exception as error:
            if failed is None:
                raise
            failed(job.name, JobFailure.of_error(error))
        else:
            if table is None:
                yield job
            else:
                take(job.name, table)
        del job  # A job can hold a model, which must not be in memory while the next one is loaded.


def _made_here(
    jobs: Iterable[Job], folder: "ResumeFolder | None", prepare: Callable[[], Any] | None, goes_on: bool
) -> Generator[tuple[str, pd.DataFrame | JobFailure], None, None]:
    prepared: tuple[Any, ...] | None = None
    for job in jobs:
        if prepared is None:
            prepared = () if prepare is None else (prepare(),)
        named_table = _made(job, folder, goes_on, *prepared)
        del job  # as in _missing
        yield named_table


def _made(
    job: Job, folder: "ResumeFolder | None", goes_on: bool, *prepared: Any
) -> tuple[str, pd.DataFrame | JobFailure]:
    """Make and store a job, unless another process has stored it; then its table is taken, even where making fails."""
    try:
        table = stored_table(job, folder)
        if table is not None:
            return job.name, table
        table = job.make(*prepared)
    except Exception as error:
        with suppress(Exception):  # the first error is the one to report
            table = stored_table(job, folder)
            if table is not None:
                return job.name, table
        if not goes_on:
            raise
        return job.name, JobFailure.of_error(error)
    if folder is None or folder.write(job.name, table):
        return job.name, table
    return _made(job, folder, goes_on, *prepared)  # another process has stored other numbers first: they are read


def _made_by_workers(
    jobs: list[Job], folder: "ResumeFolder | None", prepare: Callable[[], Any] | None, goes_on: bool, n_jobs: int
) -> Generator[tuple[str, pd.DataFrame | JobFailure], None, None]:
    # As an array, because joblib sends a large array once: processes map its file, and Dask scatters it.
    packed = None
    if prepare is not None:
        # Pickled by cloudpickle, which joblib has, and not once more: a model is large.
        picklable: Any = joblib.wrap_non_picklable_objects(prepare, keep_wrapper=False)
        _, (content,) = picklable.__reduce__()
        packed = np.frombuffer(content, dtype=np.uint8)
    token = secrets.token_hex(8)
    with workers_kept():
        calls = (joblib.delayed(_made_there)(job, folder, goes_on, packed, token) for job in jobs)
        yield from _parallel(n_jobs)(calls)


def _made_there(
    job: Job, folder: "ResumeFolder | None", goes_on: bool, packed: np.ndarray | None, token: str
) -> tuple[str, pd.DataFrame | JobFailure]:
    with without_bars(), working():
        if packed is None:
            return _made(job, folder, goes_on)
        if getattr(WORKER, "token", None) != token:
            WORKER.token = WORKER.prepared = None  # free the old one before the new one is made
            WORKER.prepared = pickle.loads(packed.data)()
            WORKER.token = token
        return _made(job, folder, goes_on, WORKER.prepared)


def backend_configured() -> bool:
    """Return whether the caller chose joblib's backend by `joblib.parallel_config`."""
    # Only where no backend is configured does a preference change the answer.
    configured = type(joblib.parallel.get_active_backend(prefer="threads")[0])
    default = type(joblib.parallel.get_active_backend(prefer="processes")[0])
    return configured is default


def configured_jobs() -> int:
    """Return the workers that the caller configured by `joblib.parallel_config`, 1 where none are."""
    workers: Any = joblib.parallel.get_active_backend()[1]
    return 1 if workers is None else workers


def _parallel(n_jobs: int) -> Any:
    """Return joblib's `Parallel`, on the backend that the caller configured if there is one.

    Raises ValueError for a backend that returns all results at the end, when none of them could be stored before.
    """
    if backend_configured():
        backend: Any = joblib.parallel.get_active_backend()[0]
        if not backend.supports_return_generator:
            raise ValueError(
                f'joblib\'s backend {type(backend).__name__} cannot hand on results one by one: configure "loky", '
                '"threading" or "dask" by joblib.parallel_config, or leave the block out'
            )
        return joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    _OWN.started = True
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
        return joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")


@dataclass
class _OwnWorkers:
    """State of the processes that joblib started for us. It has one set of them, and would keep it for minutes."""

    lock: AbstractContextManager[Any]
    blocks: int = 0
    started: bool = False


_OWN = _OwnWorkers(threading.Lock())


@contextmanager
def workers_kept() -> Iterator[None]:
    """Keep worker processes from one `finished_jobs` to the next; they end with the outermost of these blocks.

    Starting them takes seconds, because each imports torch. A configured backend's workers are left alone.
    """
    with _OWN.lock:
        _OWN.blocks += 1
    try:
        yield
    finally:
        with _OWN.lock:
            _OWN.blocks -= 1
            if _OWN.started and not _OWN.blocks:
                _OWN.started = False
                same: Any = True  # declared as text, which is its default
                get_reusable_executor(reuse=same).shutdown(wait=True)


# --- tables of jobs, put together ---


def stacked(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the rows of tables, with a fresh index.

    The result has no `attrs`: each table's belong to it alone, and `pandas.concat` would compare them.
    """
    bare = [table.copy(deep=False) for table in tables]
    for table in bare:
        table.attrs = {}
    return pd.concat(bare, ignore_index=True)


def bundled(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Put several tables into one, which `unbundled` takes apart. At least one of them has rows.

    The column `table` holds the names, `attrs["tables"]` the columns and dtypes. Index and `attrs` are lost.
    """
    columns = {
        name: {str(column): str(kind) for column, kind in table.dtypes.items()} for name, table in tables.items()
    }
    bundle = stacked(table.assign(table=name) for name, table in tables.items() if len(table))
    bundle.attrs = {"tables": columns}
    return bundle


def unbundled(bundle: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the tables that `bundled` was given, with a fresh index and without `attrs`."""
    bare = bundle.copy(deep=False)
    bare.attrs = {}
    # A column that only empty tables have is not in the bundle, so reindex in place of a selection.
    return {
        name: bare.loc[bare["table"] == name]
        .reindex(list(columns), axis="columns")
        .astype(columns)
        .reset_index(drop=True)
        for name, columns in bundle.attrs["tables"].items()
    }
