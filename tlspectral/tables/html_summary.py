"""HTML summaries of results for notebooks: a small table of a result's fields."""

import dataclasses
import html
from collections.abc import Iterable
from typing import Any

import numpy as np

_LONG = 80  # characters


def html_summary(result: Any) -> str:
    """Return a dataclass instance as an HTML string: a table with the class's name above it, one row per field that is
    not None.

    Floats have three significant digits. Values longer than 80 characters are cut.
    """
    shown = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    rows = [(name, _short(value)) for name, value in shown.items() if value is not None]
    return html_rows(type(result).__name__, rows)


def html_rows(title: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return an HTML string with a bold title above a table; `rows` are (name, text) pairs, one per row of the
    table.
    """
    cells = "".join(
        f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{html.escape(text)}</td></tr>"
        for name, text in rows
    )
    return f"<b>{html.escape(title)}</b><table>{cells}</table>"


def _short(value: Any) -> str:
    """Return the value of a dataclass field as text of at most 80 characters; for a result with the field `statistic`,
    only the text of its statistic.
    """
    if dataclasses.is_dataclass(value) and "statistic" in vars(value):
        return _short(vars(value)["statistic"])
    if isinstance(value, np.ndarray):
        return f"array of shape {value.shape}"
    if isinstance(value, (float, np.floating)):
        return f"{value:.3g}"
    if isinstance(value, tuple):
        text = ", ".join(_short(part) for part in value)
        return text if len(text) <= _LONG else f"{len(value)} values: {text[: _LONG - 20]}..."
    text = str(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
