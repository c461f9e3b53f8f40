"""Packages whose names are imported from their modules when they are first asked for."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` of a package, which imports a name from its module, and `__dir__`, the names of `__all__`.

    Modules are named from the package on: `card` stands in it, `.operators.penalty` beside it.
    """

    def imported(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f".{homes[name]}", package), name)

    return imported, lambda: sys.modules[package].__all__
