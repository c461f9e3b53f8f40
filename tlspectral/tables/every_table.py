"""Find every documented table by its name.

A schema stands beside the function that makes its table, in any room or study. This file imports all modules of the
package and of installed studies, so that tables which nothing has imported yet are found too.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points

import pandas as pd

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.tables.schema import Schema, known_schemas


def every_schema() -> dict[str, Schema]:
    """Return a dict from the name of each documented table to its `Schema` (its columns), in the order of the package's
    modules.

    All modules of the package and of installed studies are imported first.
    """
    list(_modules())
    return known_schemas()


@checked_settings
def describe_table(name: str) -> pd.DataFrame:
    """Describe the columns of a documented table, one row per column. Use it to look up a table before you make one.

    >>> import tlspectral as tls
    >>> tls.tables.describe_table("frequency_table")["name"].tolist()[:4]
    ['layer', 'head', 'name', 'frequency']

    Args:
        name: the function that returns the table, such as `"band_effects"`. If the function returns several tables, the
            table's name follows after a dot: `"head_history.summary"`.

    Returns:
        DataFrame with string columns `name, meaning, unit, label, range, source, also_known_as,
        does_not_establish`, one row per column of the table, in the table's order. `range` and the columns after it
        are filled for columns of the head table, in whichever table they stand; elsewhere `source` is "this package".

    Raises:
        ValueError: no documented table has this name; the message lists all names.

    It holds texts, not numbers: call the function itself to make the table. A column that only some calls make has a
    row too.
    """
    modules = _modules()
    while name not in known_schemas():
        if next(modules, None) is None:
            raise ValueError(f"there is no table {shown(name)}: choose one of {', '.join(sorted(known_schemas()))}")
    return pd.DataFrame([column.texts() for column in known_schemas()[name].columns])


def _modules() -> Iterator[str]:
    """Import the modules of the package and of installed studies one after the other, and yield the dotted name of each
    module.
    """
    studies = (study.module.partition(".")[0] for study in entry_points(group="tlspectral.studies"))
    for name in dict.fromkeys((__name__.partition(".")[0], *studies)):
        package = importlib.import_module(name)
        for found in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not found.name.endswith(".__main__"):
                importlib.import_module(found.name)
                yield found.name
