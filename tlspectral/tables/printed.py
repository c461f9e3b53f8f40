"""Numbers of a table as text for readers; all numbers of a column are fixed-point, or all are scientific."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_MOST = 6  # decimals
_LARGE = 1e7


def short_number(value: float, decimals: int = 3) -> str:
    """Return a number as text with three significant digits and at most `decimals` decimals; a tiny or huge number gets
    an exponent.

        >>> [short_number(value) for value in (6.2832, 62.832, 0.0123, 2e-6)]
        ['6.28', '62.8', '0.012', '2e-6']
    """
    size = abs(value)
    if not 0 < size < np.inf:
        return f"{value:.{decimals}f}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    if not 0.5 * 10.0**-decimals <= size < _LARGE:
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:.{min(decimals, max(0, 2 - int(exponent)))}f}"


def printed(table: "pd.DataFrame", digits: int) -> str:
    """Return a table as aligned text: floats of a column with `digits` decimals (more, or scientific, if they would
    print as 0 or are very large), and a dash for NaN.
    """
    shown = table.copy(deep=False)
    for place, name in enumerate(table):
        column = table.iloc[:, place]
        if column.dtype.kind == "f":
            shown[name] = number_texts(column, digits)
    return shown.to_string(index=False, na_rep="-")


def number_texts(values: Iterable[Any], digits: int) -> list[str]:
    """Return the numbers of one column as texts, all fixed-point or all scientific; a missing number is "-".

        >>> number_texts([0.5, 0.0004, float("nan")], 3)
        ['0.5000', '0.0004', '-']
        >>> number_texts([2e-7, 1e-9], 3)
        ['2.00e-07', '1.00e-09']

    A column is fixed-point if its largest absolute value shows in `digits` decimals and is below 1e7. It gets more
    decimals, up to 6, if its smallest value other than 0 would print as 0. With `digits=0` it gets no decimals.
    """
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    sizes = np.abs(numbers[np.isfinite(numbers) & (numbers != 0)])
    form = f".{digits}f"
    if len(sizes) and not 0.5 * 10.0**-digits <= sizes.max() < _LARGE:
        form = f".{max(digits - 1, 0)}e"
    elif len(sizes) and digits:
        needed = int(np.ceil(-np.log10(2 * sizes.min())))  # decimals with which the smallest value is not 0
        form = f".{min(max(digits, needed), max(digits, _MOST))}f"
    return ["-" if np.isnan(number) else f"{number:{form}}" for number in numbers]
