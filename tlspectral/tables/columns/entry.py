"""What is said of a column of a table, and of a table."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One column of a table; `also_known_as` and nothing else may be empty."""

    name: str
    meaning: str
    unit: str
    range: str
    source: str
    also_known_as: str
    does_not_establish: str

    @property
    def signed(self) -> bool:
        """Whether values below 0 are within its range."""
        return self.range.removeprefix("about ").startswith("-")


@dataclass(frozen=True)
class Table:
    """The columns of one table, in their order; the same name may mean something else in another table.

    Attributes:
        name: the function that returns the table and, where it returns several, behind a dot which of them.
        made_by: functions and commands that make it, as Markdown.
        columns: all that it can have; the entry says when a column is not always there.
    """

    name: str
    made_by: str
    columns: tuple[Column, ...]
