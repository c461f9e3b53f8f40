"""Every documented table by its name.

A schema stands beside the function that makes its table, in any room or study. Those that nothing has imported yet are
found by importing the modules of the package one by one, those of studies last.
"""

import importlib
import pkgutil
from collections.abc import Iterator

import pandas as pd

from tlspectral.tables.schema import Schema, known_schemas


def every_schema() -> dict[str, Schema]:
    """Return the schemas of all tables that the package documents, by name, in the order of its modules."""
    list(_modules())
    return known_schemas()


def describe_table(name: str) -> pd.DataFrame:
    """Describe the columns of one table, one row per column.

    Args:
        name: the function that returns the table, such as `"band_effects"`, and, where it returns several, behind a dot
            which of them, such as `"head_history.summary"`.

    Returns:
        DataFrame with the columns of `describe_columns`, in the order of the table's.

    Raises:
        ValueError: there is no such table.
    """
    modules = _modules()
    while name not in known_schemas():
        if next(modules, None) is None:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(known_schemas())}")
    return pd.DataFrame([column.texts() for column in known_schemas()[name].columns])


def _modules() -> Iterator[str]:
    """Import the modules of the package, and yield their names."""
    package = importlib.import_module(__name__.partition(".")[0])
    rooms = [room.name for room in pkgutil.iter_modules(package.__path__) if room.name != "__main__"]
    for room in sorted(rooms, key=lambda room: (room == "studies", room)):
        module = importlib.import_module(f"{package.__name__}.{room}")
        below = pkgutil.walk_packages(getattr(module, "__path__", ()), f"{module.__name__}.")
        for name in (module.__name__, *(each.name for each in below if ".tests" not in each.name)):
            importlib.import_module(name)
            yield name
