"""Every documented table by its name.

A schema stands beside the function that makes its table, in any room or study. Tables that nothing has imported yet
are found by importing every module of the package, and then the modules of installed studies.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points

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
            raise ValueError(f"there is no table {name!r}; there are {', '.join(sorted(known_schemas()))}")
    return pd.DataFrame([column.texts() for column in known_schemas()[name].columns])


def _modules() -> Iterator[str]:
    """Import the modules of the package, and yield their names."""
    studies = (study.module.partition(".")[0] for study in entry_points(group="tlspectral.studies"))
    for name in dict.fromkeys((__name__.partition(".")[0], *studies)):
        package = importlib.import_module(name)
        for each in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not each.name.endswith(".__main__"):
                importlib.import_module(each.name)
                yield each.name
