"""Bars that show how far a long measurement has come."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_HIDDEN = ContextVar("hidden", default=False)


def bar(total: int | None, description: str, unit: str, *, initial: int = 0) -> Any:
    """Return a tqdm bar, as a context; `update(n)` moves it.

    It is shown in a notebook and where stderr is a terminal. The environment variable `TQDM_DISABLE=1`, read at every
    call, switches it off.
    """
    from tqdm.auto import tqdm

    off = True if hidden() else None  # None: tqdm looks whether stderr is a terminal
    return tqdm(total=total, initial=initial, desc=description, unit=unit, leave=False, disable=off)


def hidden() -> bool:
    """Return whether bars are switched off, here or by `TQDM_DISABLE`."""
    return _HIDDEN.get() or os.environ.get("TQDM_DISABLE", "0").lower() not in ("", "0", "false")


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch bars off inside the context, in this thread alone."""
    token = _HIDDEN.set(True)
    try:
        yield
    finally:
        _HIDDEN.reset(token)
