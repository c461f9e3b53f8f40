"""The check that a table has the needed columns and rows, with one wording for all callers."""

from collections.abc import Iterable

import pandas as pd


def require(table: pd.DataFrame, columns: Iterable[str], made_by: str, *, name: str = "table") -> None:
    """Refuse a table without a needed column or without rows.

    Args:
        table: the table to check.
        columns: names that it must have.
        made_by: what makes such a table: a function, a command or a file.
        name: what the message calls the table.

    Raises:
        ValueError: the message names the missing columns and what makes such a table.
    """
    missing = [column for column in columns if column not in table]
    if missing:
        raise ValueError(f"the {name} has no column {', '.join(missing)}: give a table of {made_by}")
    if table.empty:
        raise ValueError(f"the {name} has no rows: give a table of {made_by} with at least one")
