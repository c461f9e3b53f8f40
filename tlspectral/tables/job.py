"""Jobs of a long work, and which of them this process and this thread make."""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import pandas as pd

# What this worker has prepared. Each thread has its own: two jobs must not put their hooks on one model.
WORKER = threading.local()


_SHARD: ContextVar[Any] = ContextVar("shard", default=None)
current_shard = _SHARD.get
"""Return the `tlspectral.tables.sharing.Shard` whose jobs measurements make here, None where they make all."""


@contextmanager
def sharing(one: Any) -> Iterator[None]:
    """Let measurements inside the context make the jobs of a shard; None: they make all their jobs."""
    token = _SHARD.set(one)
    try:
        yield
    finally:
        _SHARD.reset(token)


@dataclass(frozen=True)
class Job:
    """One job of a long work.

    Attributes:
        name: name of the job and of its file.
        make: makes the job's table. Where the work has a `prepare`, `make` is given what that returned.
        check: is given the stored table; raises IncompatibleCheckpoint if it does not belong to this work.
        items: how many things it measures, which the bar counts.
    """

    name: str
    make: Callable[..., pd.DataFrame]
    check: Callable[[pd.DataFrame], None] | None = None
    items: int = 1


@dataclass(frozen=True)
class JobFailure:
    """Why a job was not made, as text: not every exception can be sent from one process to another.

    Attributes:
        error: type of the exception.
        message: its message.
        raised_in: file, line and function that raised it.
    """

    error: str
    message: str
    raised_in: str

    @classmethod
    def of_error(cls, error: Exception) -> "JobFailure":
        """Describe an exception that was caught."""
        frames = traceback.extract_tb(error.__traceback__)
        raised_in = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
        return cls(type(error).__name__, str(error), raised_in)


def in_worker() -> bool:
    """Return whether this thread makes a job that another one has sent to it."""
    return getattr(WORKER, "working", False)


@contextmanager
def working() -> Iterator[None]:
    """Say of this thread that it makes a job, while the block runs."""
    WORKER.working = True
    try:
        yield
    finally:
        WORKER.working = False
