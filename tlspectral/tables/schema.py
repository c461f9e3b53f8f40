"""The schema of a table: its columns in their order, and the frame that they make.

A schema stands beside the function that makes its table and is the only description of the table. `Schema.frame` makes
the frame, `write_table` stores the texts in the file, and the site prints them. A frame whose `attrs` name no table has
no documentation; nothing is guessed from column names.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import pandas as pd

from tlspectral.errors import nearest, not_a, shown
from tlspectral.tables.meanings import CHANGES, MEANINGS, changed

_DTYPES = {"index": "int64", "count": "int64", "flag": "bool"} | dict.fromkeys(("label", "text", "numbers"), "object")
"""Pandas dtype by unit. Columns of any other unit have float64."""


@dataclass(frozen=True)
class Column:
    """The documentation of a column of a table; it holds no values.

    Attributes:
        name: name of the column.
        meaning: meaning of the value, and when it is missing.
        unit: unit of the values; `"flag"` for booleans, `"label"` for text, `"numbers"` for a list of numbers per row.
        label: plain name for printed tables, pictures and pages; empty if `name` is plain.
        always: False if only some tables of the schema have the column.
        range: smallest to largest value, or the possible labels. Only the head table has this field and the next three.
        source: paper and section, or "this package" for numbers that no paper has.
        also_known_as: other names; empty if none is known.
        does_not_establish: a conclusion that must not be drawn from the value. For other tables the docstring of their
            function says this.
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
        """Return the documentation of the column as a dict from field name ("meaning", "unit", ...) to text."""
        return {name: value for name, value in vars(self).items() if isinstance(value, str)}

    @property
    def title(self) -> str:
        """The column's name for readers: `label`, or `name` without a label."""
        return self.label or self.name

    @property
    def dtype(self) -> str:
        """The pandas dtype of the column as text, such as "float64", when no value is missing."""
        return _DTYPES.get(self.unit, "float64")

    @property
    def signed(self) -> bool:
        """True if the documented range of the column's values (`range`) begins below 0."""
        return self.range.removeprefix("about ").startswith("-")


def columns(text: str, shared: Iterable[Column] = ()) -> tuple[Column, ...]:
    """Read `Column`s from text with one line per column: name, unit and meaning, separated by `|`.

        >>> columns("value | nat | Mean loss.")
        (Column(name='value', meaning='Mean loss.', unit='nat', ...),)

    A `?` after a name marks a column that only some tables have. A line without a name continues the meaning above it.
    A line of names only, such as "layer, head", takes these `Column`s from `shared`; if several have the name, the
    first is taken.
    """
    known: dict[str, Column] = {}
    for column in shared:
        known.setdefault(column.name, column)
    listed: list[Column] = []
    for line in filter(str.strip, text.splitlines()):
        name, *texts = (cell.strip() for cell in line.split("|", 2))
        if not texts:
            listed += [
                replace(known[entry.rstrip("?")], always=entry[-1] != "?") for entry in name.rstrip(",").split(", ")
            ]
        elif name:
            listed.append(Column(name.rstrip("?"), texts[1], texts[0], always=not name.endswith("?")))
        else:
            listed[-1] = replace(listed[-1], meaning=f"{listed[-1].meaning} {texts[1]}")
    return tuple(listed)


def spelled(text: str) -> str:
    """Return a copy of `text` in the form of column names: each character but letters, digits, `_` and `-`
    becomes `_`.
    """
    return re.sub(r"[^\w-]", "_", text)


_DOCUMENTED: dict[str, dict[str, Column]] = {}
"""Columns by table and name, from the schemas that this process imported and the files that it read."""


@dataclass(frozen=True)
class Schema:
    """The documented columns of a table in their order. The same column name may mean something else in another table.

    Attributes:
        name: the function that returns the table. If it returns several tables, the table's name follows after a dot.
        columns: all columns that the table can have.
        made_by: functions and commands that make the table, as Markdown. Default: only the function.
    """

    name: str
    columns: tuple[Column, ...]
    made_by: str = ""

    def __post_init__(self) -> None:
        _SCHEMAS.setdefault(self.name, self)  # a schema that one call makes, with more columns, does not replace it
        _DOCUMENTED.setdefault(self.name, {}).update({column.name: column for column in self.columns})

    def frame(self, data: Any, attrs: Mapping[Any, Any] | None = None) -> pd.DataFrame:
        """Return `data` as a DataFrame with the columns in the order of the schema, and the table's name in
        `attrs["table"]`.

        `attrs["meanings"]` is the number of changes in the meaning of columns that the table follows
        (`tables.meanings`). If the schema has `name` and the data only `layer` and `head`, names such as L16H0 are
        added. An empty table gets the dtypes of its columns. Data without rows and columns give a table of all columns
        that are always there.

        Args:
            data: a DataFrame, a dict of columns, or rows. Columns that are not always there may be missing.
            attrs: entries to add to the frame's own `attrs`.

        Raises:
            ValueError: the data have a column that the schema lacks, or lack a column that the schema always has.
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
                f"table {self.name}: columns {unknown} are not in its schema, columns {lacking} are missing: give "
                "exactly the schema's columns"
            )
        held = {**frame.attrs, **(attrs or {}), "table": self.name}
        if changed(self.name):
            held.setdefault(MEANINGS, len(CHANGES))  # a table made from an older table already has the older number
        frame.attrs = {}
        frame = frame.loc[:, [name for name in by_name if name in frame]]
        if frame.empty:
            frame = frame.astype({name: by_name[name].dtype for name in frame})
        frame.attrs = held
        return frame


_SCHEMAS: dict[str, Schema] = {}


def known_schemas() -> dict[str, Schema]:
    """Return a dict from table name to `Schema`, for all modules that this process has imported."""
    return dict(_SCHEMAS)


def columns_of(attrs: Mapping[Any, Any]) -> Mapping[str, Column]:
    """Return a mapping from column name to `Column` for the table that `attrs["table"]` names; {} if that table is
    unknown.
    """
    name = attrs.get("table")
    return _DOCUMENTED.get(name, {}) if isinstance(name, str) else {}


def remember(name: Any, docs: Any) -> None:
    """Store the column texts that a file holds for the table `name`; `docs` is a dict from column name to {field:
    text}.

    A process that has not imported the function that makes this table can then write the texts again. Texts of an
    imported schema take precedence. Fields that this version does not know are left out. Other types of `name` or
    `docs` are ignored.
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


def require_table(table: Any, hint: str, *, name: str = "table") -> None:
    """Raise TypeError unless `table` is a DataFrame. The message calls it `name` and ends with `hint`."""
    if not isinstance(table, pd.DataFrame):
        raise TypeError(f"{not_a(table, 'a table')}: the {name} has to be a DataFrame; {hint}")


def require(
    table: pd.DataFrame, columns: Iterable[str], made_by: str, *, name: str = "table", named: Iterable[str] = ()
) -> None:
    """Raise ValueError if the table lacks one of the columns or has no rows.

    The message calls the table `name` and tells the user to give a table of `made_by`, such as "analyze_heads". `named`
    are further needed columns, which the user named: for a misspelt one the message gives the column that is near.
    """
    require_table(table, f"give a table of {made_by}", name=name)
    named = tuple(named)
    refuse_misspelt(table, named, name=name)
    missing = [column for column in (*columns, *named) if column not in table]
    if missing:
        raise ValueError(f"the {name} has no column {shown_names(missing)}: give a table of {made_by}")
    if table.empty:
        raise ValueError(f"the {name} has no rows: give a table of {made_by} with at least one")


def shown_names(names: Iterable[Any]) -> str:
    """Return column names as text for a message: the first 20, and long names shortened."""
    texts = [text if len(text := str(name)) <= 60 else shown(name, 60) for name in names]
    return ", ".join(texts[:20]) + f", ... ({len(texts)} columns)" * (len(texts) > 20)


def refuse_misspelt(table: pd.DataFrame, named: Iterable[str], *, name: str = "table") -> None:
    """Raise ValueError if the table lacks a column that the user named and has one of a similar name.

    Other missing columns pass, and so do documented names (names of the head table, unless the table names other
    columns as its own): they are not misspelt, but this table was made without them.
    """
    documented = columns_of(table.attrs) or _DOCUMENTED.get("analyze_heads", {})
    for column in named:
        if column in table or column in documented:
            continue
        if isinstance(column, str) and (near := nearest(column, map(str, table))):
            raise ValueError(f"the {name} has no column {column!r}: did you mean {near!r}?")


def require_one_row(table: pd.DataFrame, keys: list[str], hint: str, *, name: str = "table") -> None:
    """Raise ValueError if two rows of the table have equal values in the columns `keys`.

    The message calls the table `name`, shows the first such row and ends with `hint`, which says what to do.
    """
    repeated = table.duplicated(keys)
    if repeated.any():
        first = table.loc[repeated, keys].iloc[0]
        values = ", ".join(f"{key} {first[key]}" for key in keys)
        raise ValueError(f"the {name} has several rows for {values}: {hint}")
