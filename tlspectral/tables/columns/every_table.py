"""The dictionary table by table: what every column of every table means there."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType

import pandas as pd

from tlspectral.tables.columns.ablation import ABLATION_TABLES
from tlspectral.tables.columns.binding import BINDING_TABLES
from tlspectral.tables.columns.canonical import CANONICAL_TABLES
from tlspectral.tables.columns.code import CODE_TABLES
from tlspectral.tables.columns.constrained import CONSTRAINED_TABLES
from tlspectral.tables.columns.entry import Column, Table
from tlspectral.tables.columns.headline import HEADLINE_TABLES
from tlspectral.tables.columns.heads import COLUMNS, EXTRA_COLUMNS, FREQUENCY_COLUMNS, HEAD_COLUMNS
from tlspectral.tables.columns.history import HISTORY_TABLES
from tlspectral.tables.columns.model import MODEL_TABLES
from tlspectral.tables.columns.positional import POSITIONAL_COLUMNS
from tlspectral.tables.columns.replication import REPLICATION_TABLES
from tlspectral.tables.columns.spectral import SPECTRAL_TABLES
from tlspectral.tables.columns.statistics import STATISTICS_TABLES

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        table.name: table
        for table in (
            Table(
                "analyze_heads",
                "`tls.analyze_heads`, the last two with `extras`; `tlspectral analyze -o FILE` writes it",
                (*HEAD_COLUMNS, *EXTRA_COLUMNS),
            ),
            Table("frequency_table", "`tls.frequency_table`", FREQUENCY_COLUMNS),
            Table(
                "positional_symbolic",
                "`tls.positional_symbolic`, frequency with `per_frequency`",
                (*FREQUENCY_COLUMNS[:3], *POSITIONAL_COLUMNS),
            ),
            *MODEL_TABLES,
            *ABLATION_TABLES,
            *BINDING_TABLES,
            *STATISTICS_TABLES,
            *REPLICATION_TABLES,
            *HISTORY_TABLES,
            *CANONICAL_TABLES,
            *CONSTRAINED_TABLES,
            *HEADLINE_TABLES,
            *SPECTRAL_TABLES,
            *CODE_TABLES,
        )
    }
)
"""Every documented table by its name."""


def describe_table(name: str) -> pd.DataFrame:
    """What the columns of one table mean, one row per column.

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


def columns_of(names: Iterable[str]) -> list[Column]:
    """What columns of these names mean in the table that has most of them, those with an entry, in the given order.

    The same name means other things in two tables. Columns that this table does not have are taken to be those of a
    head table, which users join to others.
    """
    names = list(names)
    own = max(
        (table.columns for table in TABLES.values()), key=lambda columns: len({c.name for c in columns} & {*names})
    )
    entries = {**COLUMNS, **{column.name: column for column in own}}
    return [entries[name] for name in names if name in entries]
