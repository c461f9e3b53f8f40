"""Columns of a head table and arrays as float64. Rows with a NaN are left out and counted."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float64

from tlspectral.tables.joining import KEYS
from tlspectral.tables.schema import require_one_row

Values: TypeAlias = pd.Series | np.ndarray | Sequence[Any]
"""One number per head or model."""

_OF_ONE = ("model", "step")  # columns by which tables that belong to no one population are told apart


def as_values(values: Values, name: str) -> Float64[np.ndarray, "rows"]:
    """Return one column as float64, missing and masked values as NaN.

    Raises:
        ValueError: not numbers, or not one-dimensional; the message names it `name`.
    """
    array = _as_floats(values, name)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, found shape {array.shape}")
    return array


def as_controls(controls: Values | pd.DataFrame) -> Float64[np.ndarray, "rows controls"]:
    """Return controls as columns: a Series or 1-D array is one column, a 2-D array or DataFrame one per column."""
    if isinstance(controls, pd.DataFrame):
        return table_columns(controls, list(controls.columns))
    array = _as_floats(controls, "controls")
    if array.ndim not in (1, 2):
        raise ValueError(f"controls must have one or two dimensions, found shape {array.shape}")
    return array[:, None] if array.ndim == 1 else array


def as_names(names: str | Iterable[str]) -> list[str]:
    """Return names of columns as a list; text is one name."""
    return [names] if isinstance(names, str) else list(names)


def require_known(name: str, value: Any, known: Sequence[str]) -> None:
    """Refuse a value of an argument `name` that is not one of those that are known. Raises ValueError."""
    if value not in known:
        raise ValueError(f"{name} must be {' or '.join(map(repr, known))}, not {value!r}")


def require_one_population(heads: pd.DataFrame) -> None:
    """Refuse the heads of several models or training steps in one table: layers of both would be taken as one.

    Raises ValueError.
    """
    for name in _OF_ONE:
        if name in heads and (several := heads[name].unique().tolist())[1:]:
            raise ValueError(
                f"the table has heads of {len(several)} values of {name}, such as {several[0]!r} and {several[1]!r}, "
                f"and these are no one population: give the rows of one, heads[heads[{name!r}] == {several[0]!r}]"
            )
    if {"layer", "head"} <= {*heads.columns}:
        keys = ["layer", "head", *(key for key in (*KEYS, "position") if key in heads)]
        require_one_row(heads, keys, "are these tables of several models or steps? Give one", name="table of heads")


def table_columns(heads: pd.DataFrame, names: Sequence[str]) -> Float64[np.ndarray, "rows columns"]:
    """Return columns of a table by name, side by side.

    Raises:
        ValueError: a column that the table lacks or has twice, or that holds no numbers.
    """
    require_columns(heads, names)
    columns = [_as_floats(heads[name], f"column {name!r}") for name in names]
    return np.column_stack(columns) if columns else np.empty((len(heads), 0))


def require_columns(heads: pd.DataFrame, names: Sequence[str]) -> None:
    """Refuse a table that lacks a column, or has it twice."""
    absent = [name for name in names if name not in heads.columns]
    if absent:
        raise ValueError(f"the table has no column {absent}; it has {', '.join(map(str, heads.columns))}")
    twice = [name for name in names if (heads.columns == name).sum() > 1]
    if twice:
        raise ValueError(f"the table has more than one column called {twice}")


def require_aligned(**values: Any) -> None:
    """Refuse pandas objects whose indexes hold the same labels in another order: rows are paired by position."""
    indexed = {name: value.index for name, value in values.items() if isinstance(value, pd.Series | pd.DataFrame)}
    if not indexed:
        return
    first, *others = indexed
    for other in others:
        first_index, other_index = indexed[first], indexed[other]
        if (
            len(first_index) == len(other_index)
            and not first_index.equals(other_index)
            and first_index.sort_values().equals(other_index.sort_values())
        ):
            raise ValueError(
                f"{first} and {other} hold the same index in different orders and would be paired wrongly: "
                "reindex one of them, or pass .to_numpy() to pair by position"
            )


def complete_rows(*columns: Float64[np.ndarray, "rows *columns"]) -> Bool[np.ndarray, "rows"]:
    """Return True for the rows in which no column is NaN."""
    complete = np.ones(len(columns[0]), dtype=bool)
    for column in columns:
        complete &= ~np.isnan(column).any(axis=tuple(range(1, column.ndim)))
    return complete


def _as_floats(values: Any, name: str) -> np.ndarray:
    try:
        if isinstance(values, pd.Series):
            return values.to_numpy(dtype=np.float64, na_value=np.nan)
        if isinstance(values, np.ma.MaskedArray):
            return np.ma.filled(values.astype(np.float64), np.nan)
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must hold numbers: {error}") from error
