"""Every documented table by its name, looked up in the rooms and studies that make them.

The modules are imported when a table is asked for, so that loading one maker loads only its own texts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib import import_module

import pandas as pd

from tlspectral.tables.column import Table

_MODULES = (
    "heads.columns",
    "positional.columns",
    "heads.detectors.columns",
    "heads.composition",
    "heads.copying",
    "hooks.sweeps.columns",
    "hooks.edges.columns",
    "history.columns",
    "studies.fingerprint.published_columns",
    "studies.fingerprint.statistics.columns",
    "studies.fingerprint.columns",
    "studies.fingerprint.constrained.columns",
    "studies.positional_symbolic.columns",
    "studies.common.columns",
    "studies.bifocal.learned_frequency_columns",
    "studies.bifocal.columns",
    "studies.bifocal.code_columns",
    "studies.bifocal.equivalence_columns",
)
"""Below `tlspectral`; each has `TABLES`, a tuple of `Table`."""


class _EveryTable(Mapping[str, Table]):
    """A mapping that imports the modules one by one, until it has found the table."""

    def __getitem__(self, name: str) -> Table:
        for table in self._tables():
            if table.name == name:
                return table
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (table.name for table in self._tables())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _tables(self) -> Iterator[Table]:
        for module in _MODULES:
            yield from import_module(f"tlspectral.{module}").TABLES


TABLES: Mapping[str, Table] = _EveryTable()
"""Every documented table by its name."""


def describe_table(name: str) -> pd.DataFrame:
    """Describe the columns of one table, one row per column.

    Args:
        name: of `TABLES`: the function that returns the table, such as `"band_effects"`, and, where it returns several,
            behind a dot which of them, such as `"head_history.summary"`.

    Returns:
        DataFrame with the columns of `describe_columns`, in the order of the table's.

    Raises:
        ValueError: there is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
    return pd.DataFrame([asdict(column) for column in TABLES[name].columns])
