"""Packages whose names are imported from their modules when they are first asked for."""

import ast
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` of a package, which imports a name from its module, and `__dir__`, the names of `__all__`.

    The source of the package says under `if TYPE_CHECKING:` which module a name is imported from.
    """

    @functools.cache
    def homes() -> dict[str, str]:
        source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
        found = ast.walk(ast.parse(source))
        imports = [node for node in found if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def imported(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes()[name]), name)

    return imported, lambda: sys.modules[package].__all__
