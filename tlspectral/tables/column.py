"""What is said of a column of a table."""

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
