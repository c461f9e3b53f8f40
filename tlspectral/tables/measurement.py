"""A measurement: its schema, the settings its numbers depend on, and its jobs.

Workers share the jobs. A folder stores each finished job, and the same call resumes from it. The jobs' tables are
joined at the end.
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
from time import monotonic
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import pandas as pd
from joblib.externals.loky import get_reusable_executor

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables.job import WORKER, Job, JobFailure, current_shard, sharing, working
from tlspectral.tables.meanings import MEANINGS, changes_of_function
from tlspectral.tables.progress import EVERY, announce, bar, clock, without_bars
from tlspectral.tables.schema import Schema

if TYPE_CHECKING:
    from tlspectral.tables.resume_folder import ResumeFolder

# Another machine or number of threads changes a score by about 1e-6; another hook changes it by more.
_SAME_SCORE = 1e-4


@dataclass(frozen=True)
class Measurement:
    """A measurement, from its settings to its table.

    Call `first` for a job whose result other jobs need, such as a screen that chooses heads. Call `made` for all other
    jobs, join their tables, compute numbers over all rows (such as q-values), and call `table`.

    Attributes:
        schema: schema of the table.
        settings: everything that the numbers depend on, as JSON. They are stored in the table's `attrs` and in the
            folder's manifest. Workers, bars and the folder do not belong here.
        origin: which model was measured, for `attrs`.
        identity: further values that distinguish folders, as JSON: hashes of weights, tokens and metric, the heads. A
            function without arguments, such as a hash of all weights, is called only if there is a folder.
        folder: where each finished job is kept in a file; None keeps jobs in memory.
        score: function that returns scores of the model as it is now, a list with one score per prompt or a dict by
            name. Hooks change scores but no hash of weights. A folder that stores other scores is refused.
        n_jobs: number of workers, counted as in joblib.
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
        """The `ResumeFolder` at `folder`, opened and checked; None without a folder. Raises IncompatibleCheckpoint
        if it was made with other settings or other scores.
        """
        if self.folder is None:
            return None
        from tlspectral.tables.resume_folder import open_resume_folder  # files are not loaded where nothing is kept

        noted = {} if self.score is None else {"intact_values": _as_json(self.score())}
        identity = {name: value() if callable(value) else value for name, value in self.identity.items()}
        if changes := changes_of_function(self.schema.name):  # otherwise a table could mix rows of two meanings
            identity[MEANINGS] = changes
        opened = open_resume_folder(self.folder, {**self.settings, **identity}, noted=noted)
        for name, values in noted.items():
            _require_same_scores(opened.path, name, opened.noted[name], values)
        return opened

    def first(self, job: Job) -> pd.DataFrame:
        """Return the table of a job whose result all other jobs need. A process that does not find it in the folder
        makes it, whichever share of the jobs it has.
        """
        with sharing(None):
            return self.made([job], description=job.name, unit="job")[job.name]

    def made(self, jobs: Iterable[Job], **how: Any) -> dict[str, pd.DataFrame]:
        """Return a dict from each job's name to its table, read from the folder or made. `how` has further arguments of
        `finished_jobs`, such as `description`.
        """
        return finished_jobs(jobs, self.kept, n_jobs=self.n_jobs, **how)

    def table(self, frame: pd.DataFrame | Mapping[str, Any], **attrs: Any) -> pd.DataFrame:
        """Return `frame`, a DataFrame or a dict of columns, as a new DataFrame with the columns in the order of the
        schema; its `attrs` get `origin`, `settings` and the given `attrs`.
        """
        return self.schema.frame(frame, {**self.origin, **self.settings, **attrs})


def _as_json(scores: Iterable[float] | Mapping[str, float]) -> list[float] | dict[str, float]:
    """Return scores as plain floats: a dict by name if they have names, otherwise a list."""
    if isinstance(scores, Mapping):
        return {str(name): float(value) for name, value in scores.items()}
    return [*map(float, scores)]


def _by_name(scores: Any) -> dict[str, Any]:
    """Return scores as a dict by name: a dict as it is, a list with the names "prompt 0", "prompt 1" and so on,
    anything else as {}.
    """
    if isinstance(scores, list):
        return {f"prompt {number}": value for number, value in enumerate(scores)}
    return scores if isinstance(scores, dict) else {}


def _require_same_scores(folder: Path, name: str, stored: Any, now: list[float] | dict[str, float]) -> None:
    """Raise IncompatibleCheckpoint if a folder's stored scores of the model differ from the scores `now`.

    `stored` is the entry `name` in the folder's manifest; scores are a list by prompt or a dict by name.
    """
    before, values = _by_name(stored), _by_name(now)
    if before.keys() != values.keys() or not all(isinstance(value, float | int) for value in before.values()):
        raise IncompatibleCheckpoint(
            f"the manifest of {folder} is damaged ({name} is {stored!r:.40}): choose another folder"
        )
    for scored, value in values.items():
        then = before[scored]
        if not abs(then - value) <= _SAME_SCORE * max(1.0, abs(then)):
            raise IncompatibleCheckpoint(
                f"{folder} was made where the model without ablation had score {then:.6f} on {scored}, now it has "
                f"{value:.6f}. Other hooks on the model may be the reason: restore them, or choose another folder"
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
    around: tuple[int, int] = (0, 0),
) -> dict[str, pd.DataFrame]:
    """Return the table of every job. A stored job is read from the folder; any other job is made and stored at once.

    Several processes may do the same work in the same folder, and each may be killed at any moment. Inside a block of
    `shard`, only the jobs of that shard are made.

    Before jobs with `passes`, a line says how many passes follow, and how long they take if that is a minute or more:
    `prepare` is timed as one pass. With workers the line has no time.

    With `n_jobs=1` this process makes the jobs one after the other. Otherwise joblib distributes them to the backend of
    `joblib.parallel_config` (threads, processes, Dask). Default backend: processes with one thread each, which end with
    this call (see `workers_kept`). Each worker stores its jobs itself. The work stops at an interrupt, at a job that
    cannot be written and, without `failed`, at an error in a job. Finished jobs stay in the folder, and the
    KeyboardInterrupt gives their number.

    Args:
        jobs: jobs with different names. For a sequence, all stored files are read and checked before the first missing
            job is made. Jobs of any other iterable are taken one by one, and each is freed before the next is taken.
        folder: where finished jobs are stored; None keeps them in memory.
        description: text of the progress bar.
        unit: unit of the progress bar, the name of a job's `items`.
        prepare: function called once in every process or thread that makes a job. Its result is passed to every job;
            use it for data that is too large to send with each job. A worker of a backend that the caller configured
            keeps the result until it gets other work or ends.
        n_jobs: number of workers, counted as in joblib.
        failed: function called in this process with the name of a job that cannot be read, checked or made, and its
            failure. The other jobs go on.
        done: function called in this process with the name of each job that is stored or made.
        around: numbers of items of the same work that other calls make before and after this one. Progress counts them,
            so that several calls show one sequence of numbers.

    Returns:
        Dict from name to table, in the order of `jobs`, without the jobs that failed.

    Raises:
        IncompatibleCheckpoint: a file of the folder belongs to other work.
        MissingParts: this shard has made its jobs, and jobs of other shards are missing.
        OSError: a job cannot be written; the message names the file.
    """
    share = current_shard()
    if share is not None:
        how: dict[str, Any] = {"prepare": prepare, "n_jobs": n_jobs, "failed": failed, "done": done, "around": around}
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
        missing, total = list(missing), sum(around) + sum(job.items for job in jobs)
    goes_on = failed is not None
    if n_jobs != 1:
        missing = list(missing)
        if min(joblib.effective_n_jobs(n_jobs), len(missing)) <= 1:
            n_jobs = 1
    passes = sum(job.passes for job in missing) if isinstance(missing, list) else 0.0
    if isinstance(missing, list) and n_jobs != 1:
        if passes:
            announce(f"{description}: {passes:,.0f} passes of the model over all prompts")
        made_parts = _made_by_workers(missing, folder, prepare, goes_on, n_jobs)
    else:
        if passes and prepare is not None:
            prepare = partial(_timed, prepare, description, passes)
        made_parts = _made_here(missing, folder, prepare, goes_on)

    def finished_items() -> int:
        return around[0] + sum(sizes[name] for name in (*tables, *failures))

    try:
        with bar(total, description, unit, initial=finished_items()) as shown, closing(made_parts):
            for name, made in made_parts:
                if isinstance(made, JobFailure):
                    note(name, made)
                else:
                    take(name, made)
                shown.update(finished_items() - shown.n)  # stored jobs that were read meanwhile count too
    except KeyboardInterrupt:
        # From None, because the traceback of an interrupt tells the user nothing.
        raise KeyboardInterrupt(_what_is_kept(finished_items(), total, unit, folder)) from None
    return {name: tables[name] for name in sizes if name in tables}


def _timed(prepare: Callable[[], Any], description: str, passes: float) -> Any:
    """Return the result of `prepare`, and write how long `passes` times its work will take, if that is a minute or
    more. `description`: what the work is called.
    """
    began = monotonic()
    prepared = prepare()
    seconds = monotonic() - began
    if passes * seconds >= EVERY:
        how_long = f"about {clock(passes * seconds)}: the first pass took {clock(seconds)}"
        announce(f"{description}: {passes:,.0f} passes of the model over all prompts, {how_long}")
    return prepared


def _what_is_kept(finished: int, total: int | None, unit: str, folder: "ResumeFolder | None") -> str:
    """Return the message of an interrupt: `finished` items (named `unit`) of `total` are stored in the folder, and how
    to go on. Without a folder it says that nothing is kept.
    """
    if folder is None:
        return "stopped, and nothing is kept: give folder= to keep finished work, and the same call goes on from there"
    of_all = "" if total is None else f" of {total}"
    return f"stopped: {finished}{of_all} {unit}s are in {folder.path}; the same call goes on from there"


def stored_table(job: Job, folder: "ResumeFolder | None") -> pd.DataFrame | None:
    """Return the table of a job from its file in the folder, after `job.check`; None without folder or file.

    Raises IncompatibleCheckpoint if the file belongs to other work.
    """
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
    """Yield the jobs whose tables the folder does not have; without a folder, all jobs.

    The function also adds each job's `items` to `sizes`, calls `take` with the name and table of each stored job, and
    calls `failed` for a stored job that cannot be read (if `failed` is None, its error is raised).
    """
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
        del job  # A job can hold a model, which must leave memory before the next model is loaded.


def _made_here(
    jobs: Iterable[Job], folder: "ResumeFolder | None", prepare: Callable[[], Any] | None, goes_on: bool
) -> Generator[tuple[str, pd.DataFrame | JobFailure], None, None]:
    """Make the jobs in this process, one after the other, and yield (name, table or failure) for each.

    Tables are stored in `folder`, if it is not None. `prepare()` is called once, and its result passed to every job.
    `goes_on=True` yields an error as a failure; otherwise it is raised.
    """
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
    """Run a job, store its table in `folder` (if it is not None), and return (the job's name, its table or failure).

    If another process has stored the job meanwhile, return the stored table, even if making the job fails here.
    `prepared` is empty or holds the argument of `job.make`. `goes_on=True` returns an error as a failure; otherwise it
    is raised.
    """
    try:
        table = stored_table(job, folder)
        if table is not None:
            return job.name, table
        table = job.make(*prepared)
    except Exception as error:
        with suppress(Exception):  # report the first error
            table = stored_table(job, folder)
            if table is not None:
                return job.name, table
        if not goes_on:
            raise
        return job.name, JobFailure.of_error(error)
    if folder is None or folder.write(job.name, table):
        return job.name, table
    return _made(job, folder, goes_on, *prepared)  # another process stored other numbers first, and these are read


def _made_by_workers(
    jobs: list[Job], folder: "ResumeFolder | None", prepare: Callable[[], Any] | None, goes_on: bool, n_jobs: int
) -> Generator[tuple[str, pd.DataFrame | JobFailure], None, None]:
    """Distribute the jobs to `n_jobs` workers of joblib, and yield (name, table or failure) in the order of completion.

    Workers store tables in `folder`, if it is not None. `prepare()` is called once in each worker, and its result
    passed to every job. `goes_on=True` yields an error as a failure; otherwise it is raised.
    """
    # An array, because joblib sends a large array only once: processes map its file, and Dask scatters it.
    packed = None
    if prepare is not None:
        # cloudpickle, which joblib contains, pickles it. The bytes are taken out, so that they are not pickled again.
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
    """Run a job in a worker, store its table in `folder` (if it is not None), and return (the job's name, its table or
    failure).

    `packed` is the pickled function `prepare` as bytes. The worker calls it once for each `token`, which stands for one
    call of `finished_jobs`, and passes its result to the job. `goes_on=True` returns an error as a failure; otherwise
    it is raised.
    """
    with without_bars(), working():
        if packed is None:
            return _made(job, folder, goes_on)
        if getattr(WORKER, "token", None) != token:
            WORKER.token = WORKER.prepared = None  # free the old one before the new one is made
            WORKER.prepared = pickle.loads(packed.data)()
            WORKER.token = token
        return _made(job, folder, goes_on, WORKER.prepared)


def backend_configured() -> bool:
    """Return whether the caller (a user of this package) chose joblib's backend with `joblib.parallel_config`."""
    # A preference changes the active backend only if no backend is configured.
    configured = type(joblib.parallel.get_active_backend(prefer="threads")[0])
    default = type(joblib.parallel.get_active_backend(prefer="processes")[0])
    return configured is default


def configured_jobs() -> int:
    """Return the number of workers that the caller set with `joblib.parallel_config`; 1 if none was set."""
    workers: Any = joblib.parallel.get_active_backend()[1]
    return 1 if workers is None else workers


def _parallel(n_jobs: int) -> Any:
    """Return a `joblib.Parallel` with `n_jobs` workers that yields results as they finish: on the backend that the
    caller configured, otherwise on processes.

    Raises ValueError for a backend that returns all results at the end, because then no job could be stored before.
    """
    if backend_configured():
        backend: Any = joblib.parallel.get_active_backend()[0]
        if not backend.supports_return_generator:
            raise ValueError(
                f'joblib\'s backend {type(backend).__name__} cannot return results one by one: use "loky", "threading" '
                'or "dask" in joblib.parallel_config, or leave that block out'
            )
        return joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")
    _OWN.started = True
    with joblib.parallel_config(backend="loky", inner_max_num_threads=1):
        return joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered")


@dataclass
class _OwnWorkers:
    """State of the worker processes that joblib started for this package; joblib has one set and would keep it for
    minutes.

    Attributes:
        lock: guards the other two.
        blocks: number of open `workers_kept` blocks.
        started: True if processes were started since the last shutdown.
    """

    lock: AbstractContextManager[Any]
    blocks: int = 0
    started: bool = False


_OWN = _OwnWorkers(threading.Lock())


@contextmanager
def workers_kept() -> Iterator[None]:
    """In the block, keep joblib's worker processes from one `finished_jobs` to the next; they end with the outermost
    block.

    Starting the processes takes seconds because each imports torch. Workers of a backend that the caller configured are
    left alone.
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
                same: Any = True  # joblib annotates this argument as text, the type of its default
                get_reusable_executor(reuse=same).shutdown(wait=True)


# --- tables of jobs, put together ---


def stacked(tables: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Return one DataFrame with the rows of all tables, a new index and no `attrs`."""
    bare = [table.copy(deep=False) for table in tables]
    # pandas.concat would compare the attrs of all tables, and none of them describes the whole.
    for table in bare:
        table.attrs = {}
    return pd.concat(bare, ignore_index=True)


def bundled(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return one table with the rows of several named tables, which `unbundled` takes apart. At least one table must
    have rows.

    The column `table` holds the tables' names, `attrs["tables"]` their columns and dtypes. Index and `attrs` of the
    given tables are lost.
    """
    columns = {
        name: {str(column): str(kind) for column, kind in table.dtypes.items()} for name, table in tables.items()
    }
    bundle = stacked(table.assign(table=name) for name, table in tables.items() if len(table))
    bundle.attrs = {"tables": columns}
    return bundle


def unbundled(bundle: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the dict from name to table that `bundled` was given, each table with a new index and without `attrs`."""
    bare = bundle.copy(deep=False)
    bare.attrs = {}
    # reindex, not a selection, because a column that only empty tables have is not in the bundle.
    return {
        name: bare.loc[bare["table"] == name]
        .reindex(list(columns), axis="columns")
        .astype(columns)
        .reset_index(drop=True)
        for name, columns in bundle.attrs["tables"].items()
    }
