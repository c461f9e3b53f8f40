"""The name of a frame's table, in `attrs["table"]`, and the documentation of its columns.

The function that makes a table writes the name, and files keep it. Nothing is guessed from column names: a frame
without a name has no documentation.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pandas as pd

from tlspectral.tables.column import Column, Table

_DOCUMENTED: dict[str, dict[str, Column]] = {}
"""Columns by table and name, of the tables that this process has made or read."""


def named(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Write the table's name into the frame's `attrs`, in place, so that `write_table` can document its columns."""
    frame.attrs["table"] = table.name
    _DOCUMENTED.setdefault(table.name, {}).update({column.name: column for column in table.columns})
    return frame


def columns_of(attrs: Mapping[Any, Any]) -> Mapping[str, Column]:
    """Return the documented columns of the table that `attrs` name; empty without a known name."""
    name = attrs.get("table")
    return _DOCUMENTED.get(name, {}) if isinstance(name, str) else {}


def remember(name: Any, docs: Any) -> None:
    """Store a file's column docs, so that a process that has not loaded the table's maker can write them again.

    Docs from the maker take precedence. Fields of other versions are left out.
    """
    if not isinstance(name, str) or not isinstance(docs, dict):
        return
    known = _DOCUMENTED.setdefault(name, {})
    for column, entry in docs.items():
        if isinstance(entry, dict):
            texts = {field.name: str(entry.get(field.name, "")) for field in fields(Column)}
            known.setdefault(column, Column(**{**texts, "name": column}))
