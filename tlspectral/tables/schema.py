"""The schema of a table: its columns in their order, and the frame that they make.

A schema stands beside the function that makes its table. It is the one description of the table: `Schema.frame` makes
the frame by it, `write_table` puts it into the file, and the site prints it. Nothing is guessed from column names: a
frame without a table's name has no documentation.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pandas as pd

from tlspectral.tables.meanings import CHANGES, MEANINGS, changed

_DTYPES = {"index": "int64", "count": "int64", "flag": "bool"} | dict.fromkeys(("label", "text", "numbers"), "object")
"""By unit; of other numbers float64."""


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: its name in the table.
        meaning: what the number is, and when it is missing.
        unit: of the values; `"flag"` for booleans, `"label"` for text, `"numbers"` for
            a list of numbers in each row.
        label: its plain name, for printed tables, pictures and pages; empty where the name is plain.
        always: False where only some tables of the schema have the column.
        range: from the smallest to the largest value, or the labels. This and what follows has the head table alone.
        source: paper and section; numbers that no paper has are this package's.
        also_known_as: what others call it; empty if nothing is known.
        does_not_establish: what must not be read from it; of other tables the docstring of their function says it.
    """

    name: str
    meaning: str
    unit: str = ""
    _: KW_ONLY
    label: str = ""
    always: bool = True
    range: str = ""
    source: str = "this package"
    also_known_as: str = ""
    does_not_establish: str = ""

    def texts(self) -> dict[str, str]:
        """Return what is said of the column, by the name of the field."""
        return {name: value for name, value in vars(self).items() if isinstance(value, str)}

    @property
    def title(self) -> str:
        """What people read: the plain name, else the name."""
        return self.label or self.name

    @property
    def dtype(self) -> str:
        """The pandas dtype of its values where none is missing."""
        return _DTYPES.get(self.unit, "float64")

    @property
    def signed(self) -> bool:
        """Whether values below 0 are within its range."""
        return self.range.removeprefix("about ").startswith("-")


def columns(text: str, shared: Iterable[Column] = ()) -> tuple[Column, ...]:
    """Read columns from text with a line for each: name, unit and meaning, separated by `|`.

    `?` behind a name marks a column that only some tables have. A line without a name goes on with the meaning above. A
    line of names alone, "layer, head", takes these from the shared columns, of two with one name the first.

        >>> columns("value | nat | Mean loss.")
        (Column(name='value', meaning='Mean loss.', unit='nat', ...),)
    """
    known: dict[str, Column] = {}
    for column in shared:
        known.setdefault(column.name, column)
    found: list[Column] = []
    for line in filter(str.strip, text.splitlines()):
        name, *said = (cell.strip() for cell in line.split("|", 2))
        if not said:
            found += [replace(known[one.rstrip("?")], always=one[-1] != "?") for one in name.rstrip(",").split(", ")]
        elif name:
            found.append(Column(name.rstrip("?"), said[1], said[0], always=not name.endswith("?")))
        else:
            found[-1] = replace(found[-1], meaning=f"{found[-1].meaning} {said[1]}")
    return tuple(found)


def spelled(text: str) -> str:
    """Return text as it stands in a column's name: other characters than letters, digits, `_` and `-` become `_`."""
    return re.sub(r"[^\w-]", "_", text)


_DOCUMENTED: dict[str, dict[str, Column]] = {}
"""Columns by table and name, of the schemas that this process has imported and of the files that it has read."""


@dataclass(frozen=True)
class Schema:
    """The columns of one table, in their order. The same name may mean something else in another table.

    Attributes:
        name: the function that returns the table and, where it returns several, behind a dot which of them.
        columns: all that it can have.
        made_by: functions and commands that make it, as Markdown; by default the function alone.
    """

    name: str
    columns: tuple[Column, ...]
    made_by: str = ""

    def __post_init__(self) -> None:
        _SCHEMAS.setdefault(self.name, self)  # one with more columns, of a call's own, does not replace it
        _DOCUMENTED.setdefault(self.name, {}).update({column.name: column for column in self.columns})

    def frame(self, data: Any, attrs: Mapping[Any, Any] | None = None) -> pd.DataFrame:
        """Return the table that data make: columns in the order of the schema, its name in `attrs`.

        `attrs["meanings"]` says which meaning columns have that changed it under one name (`tables.meanings`).

        Where the schema has `name` and the data `layer` and `head` alone, the names of heads are filled in, such as
        L16H0. An empty table has the types of its columns; no rows make one with all that are always there.

        Args:
            data: a frame, columns by name, or rows; may lack columns that are not always there.
            attrs: added to the frame's own.

        Raises:
            ValueError: a column that the schema lacks, or that the data lack and the schema always has.
        """
        frame = data.copy(deep=False) if isinstance(data, pd.DataFrame) else pd.DataFrame(data)
        by_name = {column.name: column for column in self.columns}
        if not frame.size and not len(frame.columns):
            frame = frame.reindex(columns=[column.name for column in self.columns if column.always])
        if "name" in by_name and "name" not in frame and {"layer", "head"} <= set(frame):
            frame["name"] = "L" + frame["layer"].astype(str) + "H" + frame["head"].astype(str)
        unknown = [name for name in frame if name not in by_name]
        lacking = [column.name for column in self.columns if column.always and column.name not in frame]
        if unknown or lacking:
            raise ValueError(
                f"table {self.name}: columns {unknown} are not in its schema, columns {lacking} are missing"
            )
        held = {**frame.attrs, **(attrs or {}), "table": self.name}
        if changed(self.name):
            held.setdefault(MEANINGS, len(CHANGES))  # a table that is made from an older one says so by itself
        frame.attrs = {}
        frame = frame.loc[:, [name for name in by_name if name in frame]]
        if frame.empty:
            frame = frame.astype({name: by_name[name].dtype for name in frame})
        frame.attrs = held
        return frame


_SCHEMAS: dict[str, Schema] = {}


def known_schemas() -> dict[str, Schema]:
    """Return the schemas of the modules that this process has imported, by name."""
    return dict(_SCHEMAS)


def columns_of(attrs: Mapping[Any, Any]) -> Mapping[str, Column]:
    """Return the documented columns of the table that `attrs` name; empty without a known name."""
    name = attrs.get("table")
    return _DOCUMENTED.get(name, {}) if isinstance(name, str) else {}


def remember(name: Any, docs: Any) -> None:
    """Store a file's column docs, so that a process that has not imported the table's maker can write them again.

    Docs from the maker take precedence. Fields of other versions are left out.
    """
    if not isinstance(name, str) or not isinstance(docs, dict):
        return
    fields = Column("", "").texts()
    known = _DOCUMENTED.setdefault(name, {})
    for column, entry in docs.items():
        if isinstance(entry, dict):
            known.setdefault(
                column, Column(**{**{field: str(entry.get(field, "")) for field in fields}, "name": column})
            )


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
