"""Rows of the positional and symbolic tables: checks, rows without NaN, rows of a head, names of heads."""

from collections.abc import Iterable

import pandas as pd

from tlspectral.selection import Head, head_name, head_pair
from tlspectral.tables.required import require


def require_one_row_per(table: pd.DataFrame, keys: list[str], hint: str) -> None:
    """Refuse a table with two rows of equal keys. Raises ValueError, which names the first of them."""
    repeated = table.duplicated(keys)
    if repeated.any():
        first = table.loc[repeated, keys].iloc[0]
        values = ", ".join(f"{key} {first[key]}" for key in keys)
        raise ValueError(f"the table has several rows for {values}: {hint}")


def require_heads(table: pd.DataFrame, columns: Iterable[str], made_by: str) -> None:
    """Refuse a table without these columns of single heads, or with two rows of a head. Raises ValueError."""
    require(table, ["layer", "head", *columns], made_by)
    require_one_row_per(table, ["layer", "head"], "give one row per head")


def without_nan(table: pd.DataFrame, columns: list[str]) -> tuple[pd.DataFrame, str | None]:
    """The rows without NaN in these columns, and a note about the others, None if there are none."""
    complete = table.dropna(subset=columns)
    count = len(table) - len(complete)
    if not count:
        return complete, None
    rows = "row" if count == 1 else "rows"
    with_nan = [column for column in columns if table[column].isna().any()]
    return complete, f"not drawn: {count} {rows} with NaN in {' or '.join(with_nan)}"


def of_head(table: pd.DataFrame, head: Head) -> pd.DataFrame:
    """The rows of one head. Raises ValueError where it has none."""
    layer, index = head_pair(head)
    rows = table.loc[(table["layer"] == layer) & (table["head"] == index)]
    if rows.empty:
        raise ValueError(f"{head_name(layer, index)} has no row in the table: give one of the heads that it holds")
    return rows
