"""Pickles of a model after `run_with_cache`, which leaves hooks on it."""

import copyreg
import sys
from typing import Any


def send_captures_by_name() -> None:
    """Let pickles refer to transformers' collector of outputs by its name.

    After `run_with_cache` hooks stay on the model that refer to the collector. It holds a context variable, which
    cannot be pickled.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if hasattr(capturing, "CompileableContextVar"):
        copyreg.pickle(capturing.CompileableContextVar, _by_name)  # pyright: ignore[reportOptionalMemberAccess]


def _by_name(collector: Any) -> str:
    """Return the variable of the collector's module that holds it."""
    held = vars(sys.modules[type(collector).__module__]).items()
    return next(name for name, value in held if value is collector)
