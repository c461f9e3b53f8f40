"""A table in Markdown."""

from collections.abc import Iterable


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty one behind it; bars and tildes in cells are escaped."""
    names = list(header)
    return [_row(names), "|---" * len(names) + "|", *map(_row, rows), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("~", "\\~") for cell in cells) + " |"
