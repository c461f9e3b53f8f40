"""`lazy_names`: import the public names of a package from its modules at their first use."""

import ast
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return two functions for a package's `__init__`: `__getattr__`, which imports public names late, and `__dir__`.

    `__getattr__(name)` imports the name from its module; the imports under `if TYPE_CHECKING:` in the package's source
    tell which module that is. `__dir__()` returns the names in `__all__`. `package`: dotted name, such as
    "tlspectral.tasks".
    """

    @functools.cache
    def homes() -> dict[str, str]:
        """Return a dict from each public name to the module that defines it."""
        source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def imported(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes()[name]), name)

    return imported, lambda: sys.modules[package].__all__
