"""Jobs of a long piece of work, and the state that says which jobs this thread makes."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pandas as pd

# The prepared data of a worker. Each thread has its own, because two jobs must not place hooks on the same model.
WORKER = threading.local()


_SHARD: ContextVar[Any] = ContextVar("shard", default=None)
current_shard = _SHARD.get
"""Return the `tlspectral.tables.sharing.Shard` whose jobs are made here, or None if all jobs are made here."""


@contextmanager
def sharing(shard: Any) -> Iterator[None]:
    """In the block, let measurements make only the jobs of `shard`, a `Shard` (the jobs of one of several processes);
    with None they make all jobs. At the end of the block the earlier setting is restored.
    """
    token = _SHARD.set(shard)
    try:
        yield
    finally:
        _SHARD.reset(token)


@dataclass(frozen=True)
class Job:
    """A job of a long piece of work; `finished_jobs` runs it and stores the table that it returns.

    Attributes:
        name: name of the job and of its file.
        make: function that returns the job's table. If the work has a `prepare`, `make` gets the result of `prepare` as
            its argument.
        check: function that gets a stored table and raises IncompatibleCheckpoint if the table belongs to other work.
        items: number of things that the job measures, counted by the progress bar.
        passes: time of the job, in units of the time of `prepare`, which is one pass over all prompts. Long work prints
            an estimate of its time from this number. Default: 0, no estimate.
    """

    name: str
    make: Callable[..., pd.DataFrame]
    check: Callable[[pd.DataFrame], None] | None = None
    items: int = 1
    passes: float = 0.0


@dataclass(frozen=True)
class JobFailure:
    """An error of a job as text, because not every exception can be sent from one process to another.

    Attributes:
        error: name of the exception's type.
        message: message of the exception.
        raised_in: file, line and function that raised it.
    """

    error: str
    message: str
    raised_in: str

    @classmethod
    def of_error(cls, error: Exception) -> "JobFailure":
        """Return the `JobFailure` that describes a caught exception."""
        frames = traceback.extract_tb(error.__traceback__)
        raised_in = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return cls(type(error).__name__, str(error), raised_in)


def in_worker() -> bool:
    """Return True if this thread is inside a block of `working`: it makes a job that another thread or process sent
    to it.
    """
    return getattr(WORKER, "working", False)


@contextmanager
def working() -> Iterator[None]:
    """Mark this thread as a worker while the block runs, so that `in_worker` returns True; at the end of the block the
    mark is removed.
    """
    WORKER.working = True
    try:
        yield
    finally:
        WORKER.working = False
