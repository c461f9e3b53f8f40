"""The documentation of one column and of one table, and the name of a frame's table in `attrs["table"]`.

The function that makes a table writes the name, and files keep it. Nothing is guessed from column names: a frame
without a name has no documentation.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: its name in the table.
        meaning: what the number is, with its formula, and when it is missing.
        unit: of the values; `"flag"` for booleans.
        range: from the smallest to the largest value, or the labels.
        source: paper and section; numbers that no paper has are this package's.
        also_known_as: what others call it; empty if nothing is known.
        does_not_establish: what must not be read from it; empty for labels, indices and settings.
    """

    name: str
    meaning: str
    unit: str = ""
    _: KW_ONLY
    range: str = ""
    source: str = "this package"
    also_known_as: str = ""
    does_not_establish: str = ""

    @property
    def signed(self) -> bool:
        """Whether values below 0 are within its range."""
        return self.range.removeprefix("about ").startswith("-")


@dataclass(frozen=True)
class Table:
    """The columns of one table, in their order. The same name may mean something else in another table.

    Attributes:
        name: the function that returns the table and, where it returns several, behind a dot which of them.
        made_by: functions and commands that make it, as Markdown.
        columns: all that it can have; `meaning` says when a column is missing.
    """

    name: str
    made_by: str
    columns: tuple[Column, ...]


_DOCUMENTED: dict[str, dict[str, Column]] = {}
"""Columns by table and name, of the tables that this process has made or read."""


def named(frame: pd.DataFrame, table: Table) -> pd.DataFrame:
    """Write the table's name into the frame's `attrs`, in place, so that `write_table` can document its columns.

    A table with the column `name` that has `layer` and `head` alone gets the names of the heads, such as L16H0.
    """
    documented = {column.name: column for column in table.columns}
    if "name" in documented and "name" not in frame and {"layer", "head"} <= set(frame):
        names = "L" + frame["layer"].astype(str) + "H" + frame["head"].astype(str)
        frame.insert(list(frame).index("head") + 1, "name", names)
    frame.attrs["table"] = table.name
    _DOCUMENTED.setdefault(table.name, {}).update(documented)
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
