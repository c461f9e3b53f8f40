"""Columns of a head table, and arrays, as float64. Rows with NaN are left out and counted."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64

from tlspectral.errors import shown
from tlspectral.tables.joining import KEYS
from tlspectral.tables.schema import refuse_misspelt, require_one_row, require_table, shown_names

Values: TypeAlias = pd.Series | np.ndarray | Sequence[Any]
"""One number per head or model."""

_OF_ONE = ("model", "step")  # columns that must have a single value, otherwise heads of several models are mixed


def as_values(values: Values, name: str) -> Float64[np.ndarray, "rows"]:
    """Return one column of numbers as a float64 array [rows]; missing and masked values become NaN.

    Raises:
        ValueError: the values are not numbers or not one-dimensional; the message calls them `name`.
    """
    array = _as_floats(values, name)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, found shape {array.shape}: give one number per row")
    return array


def as_controls(controls: Values | pd.DataFrame) -> Float64[np.ndarray, "rows controls"]:
    """Return `controls` (numbers, a Series, an array or a DataFrame) as a float64 array [rows, controls]; a Series or
    1-D array becomes a single column.

    Raises ValueError for values that are not numbers.
    """
    if isinstance(controls, pd.DataFrame):
        return table_columns(controls, list(controls.columns))
    array = _as_floats(controls, "controls")
    if array.ndim not in (1, 2):
        raise ValueError(f"controls must be [rows] or [rows, controls], found shape {array.shape}: give such an array")
    return array[:, None] if array.ndim == 1 else array


def as_names(names: str | Iterable[str]) -> list[str]:
    """Return column names as a list; a single text becomes a list of one name."""
    return [names] if isinstance(names, str) else list(names)


def require_known(name: str, value: Any, known: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of `known`; the message calls it `name`."""
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, not {shown(value)}")


def require_one_population(heads: pd.DataFrame) -> None:
    """Raise ValueError if the table mixes heads of several models or training steps, whose layers would be confused, or
    has two rows for a head; TypeError if it is not a DataFrame.
    """
    require_table(heads, "give a table such as the result of tls.analyze_heads")
    for name in _OF_ONE:
        if name in heads and (several := heads[name].unique().tolist())[1:]:
            raise ValueError(
                f"the table has {len(several)} values of {name}, such as {several[0]!r} and {several[1]!r}, but its "
                f"heads must be of one {name}: give heads[heads[{name!r}] == {several[0]!r}]"
            )
    if {"layer", "head"} <= {*heads.columns}:
        keys = ["layer", "head", *(key for key in (*KEYS, "position") if key in heads)]
        require_one_row(heads, keys, "are these tables of several models or steps? Give one", name="table of heads")


def table_columns(heads: pd.DataFrame, names: Sequence[str]) -> Float64[np.ndarray, "rows columns"]:
    """Return the columns `names` of the table `heads` as a float64 array [rows, columns], in the order of `names`;
    missing values are NaN.

    Raises:
        ValueError: the table lacks a column, has it twice, or a column has values that are not numbers.
    """
    require_columns(heads, names)
    columns = [_as_floats(heads[name], f"column {name!r}") for name in names]
    return np.column_stack(columns) if columns else np.empty((len(heads), 0))


def require_columns(heads: pd.DataFrame, names: Sequence[str]) -> None:
    """Raise ValueError if the table `heads` lacks one of the columns `names` or has it twice, TypeError if it is not a
    DataFrame.
    """
    require_table(heads, "give a table such as the result of tls.analyze_heads")
    refuse_misspelt(heads, names)
    absent = [name for name in names if name not in heads.columns]
    if absent:
        raise ValueError(f"the table has no column {shown(absent)}: choose from {shown_names(heads.columns)}")
    twice = [name for name in names if (heads.columns == name).sum() > 1]
    if twice:
        raise ValueError(f"the table has more than one column called {twice}: rename or drop one of them")


def require_aligned(**values: Any) -> None:
    """Raise ValueError if pandas objects have the same index labels in different orders, and would be paired wrongly.

    `values`: the arguments by name; rows are paired by position. Objects without an index are not checked.
    """
    indexed = {name: value.index for name, value in values.items() if isinstance(value, pd.Series | pd.DataFrame)}
    if not indexed:
        return
    first, *further = indexed
    for other in further:
        first_index, other_index = indexed[first], indexed[other]
        if (
            len(first_index) == len(other_index)
            and not first_index.equals(other_index)
            and first_index.sort_values().equals(other_index.sort_values())
        ):
            raise ValueError(
                f"{first} and {other} have the same index in different orders and would be paired wrongly: reindex one "
                "of them, or pass .to_numpy() to pair them by position"
            )


def complete_rows(*columns: Float64[np.ndarray, "rows *columns"]) -> Bool[np.ndarray, "rows"]:
    """Return a boolean mask [rows], True for rows without NaN in any of `columns`, arrays of the same rows."""
    complete = np.ones(len(columns[0]), dtype=bool)
    for column in columns:
        complete &= ~np.isnan(column).any(axis=tuple(range(1, column.ndim)))
    return complete


def _as_floats(values: Any, name: str) -> np.ndarray:
    """Return values as a float64 array, with NaN for missing and masked values.

    Raises ValueError, which calls the argument `name`, if they are not numbers.
    """
    try:
        if isinstance(values, pd.Series):
            return values.to_numpy(dtype=np.float64, na_value=np.nan)
        if isinstance(values, np.ma.MaskedArray):
            return np.ma.filled(values.astype(np.float64), np.nan)
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold numbers: {str(error)[:120]}") from error
