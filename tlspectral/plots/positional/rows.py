"""Rows of the positional and symbolic tables: checks, rows without NaN, rows of a head, names of heads."""

import operator
import re
from collections.abc import Iterable
from typing import SupportsIndex

import pandas as pd

from tlspectral.tables.required import require

Head = tuple[SupportsIndex, SupportsIndex] | str
"""A head as the pair (layer, head) or by its name, "L12H0"."""


def require_one_row_per(table: pd.DataFrame, keys: list[str], hint: str) -> None:
    """Refuse a table with two rows of equal keys.

    Raises:
        ValueError: it names the keys of the first such pair of rows.
    """
    repeated = table.duplicated(keys)
    if repeated.any():
        first = table.loc[repeated, keys].iloc[0]
        values = ", ".join(f"{key} {first[key]}" for key in keys)
        raise ValueError(f"the table has several rows for {values}: {hint}")


def without_nan(table: pd.DataFrame, columns: list[str]) -> tuple[pd.DataFrame, str | None]:
    """The rows without NaN in these columns, and a note about the others, None if there are none."""
    complete = table.dropna(subset=columns)
    count = len(table) - len(complete)
    if not count:
        return complete, None
    rows = "row" if count == 1 else "rows"
    with_nan = [column for column in columns if table[column].isna().any()]
    return complete, f"not drawn: {count} {rows} with NaN in {' or '.join(with_nan)}"


def head_pair(head: Head) -> tuple[int, int]:
    """The pair (layer, head) of a pair or of a name.

    Raises:
        ValueError: the text is no head's name.
    """
    if not isinstance(head, str):
        layer, index = head
        return operator.index(layer), operator.index(index)
    match = re.fullmatch(r"L(\d+)H(\d+)", head)
    if match is None:
        raise ValueError(f"{head!r} is not the name of a head: write L12H0 or (12, 0)")
    return int(match[1]), int(match[2])


def head_pairs(heads: Iterable[Head] | pd.DataFrame) -> list[tuple[int, int]]:
    """The pairs (layer, head) in order, each once; of a DataFrame its columns `layer` and `head`.

    Raises:
        ValueError: a text is no head's name, a DataFrame has no such columns, or `heads` is one name instead of a list.
    """
    if isinstance(heads, str):
        raise ValueError(f"give a list of heads, [{heads!r}], not one name")
    if isinstance(heads, pd.DataFrame):
        require(heads, ["layer", "head"], "heads")
        heads = zip(heads["layer"], heads["head"], strict=True)
    return list(dict.fromkeys(head_pair(head) for head in heads))


def of_head(table: pd.DataFrame, head: Head) -> pd.DataFrame:
    """The rows of one head.

    Raises:
        ValueError: it has none.
    """
    layer, index = head_pair(head)
    rows = table.loc[(table["layer"] == layer) & (table["head"] == index)]
    if rows.empty:
        raise ValueError(f"{head_name(layer, index)} has no row in the table: give one of the heads that it holds")
    return rows


def head_name(layer: int, head: int) -> str:
    """The name of a head: L12H0."""
    return f"L{layer}H{head}"
