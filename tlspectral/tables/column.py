"""The documentation of one column, and of one table."""

from dataclasses import KW_ONLY, dataclass


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
