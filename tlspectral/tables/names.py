"""Which table a frame is: its maker writes the name into `attrs["table"]`, and files carry it.

Nothing is guessed from column names: a frame without a name has no documentation.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pandas as pd

from tlspectral.tables.column import Column, Table

_DOCUMENTED: dict[str, dict[str, Column]] = {}
"""Columns by table and name, of the makers and files that this process has met."""


def named(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Mark a frame as one of a table, in place, so that `write_table` can document its columns."""
    frame.attrs["table"] = table.name
    _DOCUMENTED.setdefault(table.name, {}).update({column.name: column for column in table.columns})
    return frame


def columns_of(attrs: Mapping[Any, Any]) -> Mapping[str, Column]:
    """The documented columns of the table that a frame's `attrs` name; empty without a known name."""
    name = attrs.get("table")
    return _DOCUMENTED.get(name, {}) if isinstance(name, str) else {}


def remember(name: Any, docs: Any) -> None:
    """Keep a file's docs of its columns, so that a process without the table's maker can write them again.

    What the maker itself says comes first. Fields of other versions are left out.
    """
    if not isinstance(name, str) or not isinstance(docs, dict):
        return
    known = _DOCUMENTED.setdefault(name, {})
    for column, entry in docs.items():
        if isinstance(entry, dict):
            texts = {field.name: str(entry.get(field.name, "")) for field in fields(Column)}
            known.setdefault(column, Column(**{**texts, "name": column}))
