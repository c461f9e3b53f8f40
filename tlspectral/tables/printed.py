"""Numbers of a table as text for people: a column is fixed throughout, or scientific throughout."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_MOST = 6  # decimals
_LARGE = 1e7


def printed(table: "pd.DataFrame", digits: int) -> str:
    """Return a table as aligned text, its numbers as `number_texts` writes them column by column, NaN as a dash."""
    shown = table.copy(deep=False)
    for place, name in enumerate(table):
        column = table.iloc[:, place]
        if column.dtype.kind == "f":
            shown[name] = number_texts(column, digits)
    return shown.to_string(index=False, na_rep="-")


def number_texts(values: Iterable[Any], digits: int) -> list[str]:
    """Write the numbers of one column, all of them fixed or all scientific; a missing one is a dash.

    Fixed are columns whose largest number, without its sign, shows in `digits` decimals and is below 1e7. They get more
    decimals, up to 6, where the smallest other than 0 would read as 0; with `digits=0` none.

        >>> number_texts([0.5, 0.0004, float("nan")], 3)
        ['0.5000', '0.0004', '-']
        >>> number_texts([2e-7, 1e-9], 3)
        ['2.00e-07', '1.00e-09']
    """
    numbers = np.array([np.nan if value is None else float(value) for value in values])
    sizes = np.abs(numbers[np.isfinite(numbers) & (numbers != 0)])
    form = f".{digits}f"
    if len(sizes) and not 0.5 * 10.0**-digits <= sizes.max() < _LARGE:
        form = f".{max(digits - 1, 0)}e"
    elif len(sizes) and digits:
        needed = int(np.ceil(-np.log10(2 * sizes.min())))  # of which it rounds to one in the last decimal, or more
        form = f".{min(max(digits, needed), max(digits, _MOST))}f"
    return ["-" if np.isnan(number) else f"{number:{form}}" for number in numbers]
