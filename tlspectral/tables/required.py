"""Checks that a table has the needed columns and rows, with one wording for all callers."""

from collections.abc import Iterable

import pandas as pd


def require(table: pd.DataFrame, columns: Iterable[str], made_by: str, *, name: str = "table") -> None:
    """Refuse a table, called `name`, without a needed column or without rows.

    Raises ValueError, which names the missing columns and what makes such a table: a function, a command or a file.
    """
    missing = [column for column in columns if column not in table]
    if missing:
        raise ValueError(f"the {name} has no column {', '.join(missing)}: give a table of {made_by}")
    if table.empty:
        raise ValueError(f"the {name} has no rows: give a table of {made_by} with at least one")


def require_one_row(table: pd.DataFrame, keys: list[str], hint: str, *, name: str = "table") -> None:
    """Refuse a table, called `name`, with two rows of equal keys. Raises ValueError, which names the first of them."""
    repeated = table.duplicated(keys)
    if repeated.any():
        first = table.loc[repeated, keys].iloc[0]
        values = ", ".join(f"{key} {first[key]}" for key in keys)
        raise ValueError(f"the {name} has several rows for {values}: {hint}")
