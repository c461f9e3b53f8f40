"""Progress of a long measurement: a bar on a terminal and in a notebook, a line per minute in a log."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic
from typing import Any

_HIDDEN = ContextVar("hidden", default=False)
EVERY = 60.0  # seconds between two lines of a log
_LONG = 600.0  # seconds of work that has a line at once


def bar(total: int | None, description: str, unit: str, *, initial: int = 0) -> Any:
    """Return a context manager that shows progress; its `update(n)` counts `n` more items.

    It is a tqdm bar in a notebook and if stderr is a terminal. Otherwise stderr gets a line per minute, and no line for
    work under a minute. Work that will take ten minutes or more has a line after its first items. `total` is the number
    of items (None: unknown), `description` the text in front, `unit` the name of an item, `initial` the number of items
    done before. The environment variable `TQDM_DISABLE=1`, read at every call, switches both off.
    """
    from tqdm.auto import tqdm

    off = True if hidden() else None  # with None tqdm checks whether stderr is a terminal
    shown = tqdm(total=total, initial=initial, desc=description, unit=unit, leave=False, disable=off)
    return _Lines(total, description, unit, initial) if shown.disable and not off else shown


def announce(text: str) -> None:
    """Write a line about work that is about to begin, such as its cost, to stderr, above an open bar.

    Nothing is written where progress is switched off (`hidden`).
    """
    from tqdm.auto import tqdm

    if not hidden():
        tqdm.write(text, file=sys.stderr)
        sys.stderr.flush()


class _Lines:
    """Progress as lines on stderr, one per minute, with the interface of a tqdm bar (a context manager with `update`).

    `__init__` gets total (number of items, None if unknown), description (text in front), unit (name of an item) and
    initial (items done before).
    """

    def __init__(self, total: int | None, description: str, unit: str, initial: int):
        self.total, self.n, self._initial = total, initial, initial
        self._said, self._unit, self._told = description, unit, False
        self._began = self._last = monotonic()

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *raised: Any) -> None:
        """Print nothing at the end of the block and let its errors through; the caller reports the end."""

    def update(self, n: int = 1) -> None:
        """Count `n` more items. Write a line to stderr if the last line is a minute old, or if the first items show
        that the work is long.
        """
        self.n += n
        now = monotonic()
        spent, done = now - self._began, self.n - self._initial
        left = None if self.total is None or done <= 0 else spent * (self.total - self.n) / done
        is_long = not self._told and left is not None and left >= _LONG
        self._told |= done > 0
        if now - self._last < EVERY and not is_long:
            return
        self._last = now
        text = f"{self._said}: {self.n}{'' if self.total is None else f' of {self.total}'} ({self._unit})"
        sys.stderr.write(f"{text}, {clock(spent)} spent{'' if left is None else f', {clock(left)} left'}\n")
        sys.stderr.flush()

    def set_postfix(self, measures: Any) -> None:
        """Do nothing: a bar would show these values at its end, and log lines have no place for them."""


def clock(seconds: float) -> str:
    """Return a number of seconds as text, "m:ss" or "h:mm:ss"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def hidden() -> bool:
    """Return whether progress is switched off, by a block of `without_bars` or by the environment variable
    `TQDM_DISABLE`.
    """
    return _HIDDEN.get() or os.environ.get("TQDM_DISABLE", "0").lower() not in ("", "0", "false")


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch off progress bars and log lines inside the block, in this thread only; at its end they are as before."""
    token = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(token)
