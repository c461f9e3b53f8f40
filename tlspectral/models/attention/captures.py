"""Pickles of a model after `run_with_cache`, which leaves hooks on it."""

import copyreg
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


def send_captures_by_name() -> None:
    """Let pickles refer to transformers' collector of outputs by its name.

    After `run_with_cache` hooks stay on the model that refer to the collector. It holds a context variable, which
    cannot be pickled.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if hasattr(capturing, "CompileableContextVar"):
        copyreg.pickle(capturing.CompileableContextVar, _by_name)  # pyright: ignore[reportOptionalMemberAccess]


def _by_name(collector: Any) -> tuple[Callable[[str], Any], tuple[str]]:
    module = sys.modules[type(collector).__module__]
    name = next(name for name, value in vars(module).items() if value is collector)
    return partial(_from_module, module.__name__), (name,)


def _from_module(module: str, name: str) -> Any:
    return getattr(import_module(module), name)
