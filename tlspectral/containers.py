"""Lists, arrays and frames of any library, read as Python values.

A container is known by what it offers, not by its type: an array makes a list of itself, and a frame has columns by
name. No library has to be imported for it.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

_TO_LIST = ("tolist", "to_pylist", "to_list")  # numpy, torch and pandas; pyarrow; polars


def plain(value: Any) -> Any:
    """Return a value without axes (a number or text of numpy, torch or pyarrow) as Python has it; others as they are.

    >>> import numpy as np
    >>> plain(np.array("L1H2"))
    'L1H2'
    """
    if hasattr(value, "as_py"):
        return value.as_py()
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item") and not _field_names(value):
        return value.item()
    return value


def is_array(value: Any) -> bool:
    """Return whether a value is an array, a tensor or a column of any library: it has an axis and is no list."""
    if isinstance(value, str | bytes | list | tuple | Mapping | Set):
        return False
    axes = getattr(value, "ndim", None)
    return axes > 0 if isinstance(axes, int) else any(hasattr(value, method) for method in _TO_LIST)


def values(given: Any) -> list[Any] | None:
    """Return what a container holds, in its order; None for text, mappings, frames and what is no container.

    Arrays become nested lists, also those in the cells of a column. Entries of a list stay as they are, but for values
    without axes.
    """
    if isinstance(given, str | bytes | Mapping) or column_names(given) is not None:
        return None
    if is_array(given):
        method = next((method for method in _TO_LIST if hasattr(given, method)), None)
        listed = list(given) if method is None else getattr(given, method)()
        return [_nested(one) for one in listed] if isinstance(listed, list) else None
    # An array without axes has the methods of a container.
    return [plain(one) for one in given] if isinstance(given, Iterable) and not hasattr(given, "ndim") else None


def are_columns(given: Any) -> bool:
    """Return whether a value holds columns: it is a tuple or list of one-axis arrays, or a tuple of two lists.

    `np.where` and `np.unravel_index` return such columns, for heads the layers and then the heads. Read entry by
    entry, as rows (layer, head), they would name other heads.
    """
    if not isinstance(given, list | tuple) or not given:
        return False
    if all(is_array(one) and getattr(one, "ndim", 1) == 1 and not named_fields(one) for one in given):
        return True
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(one, list) for one in given)


def named_fields(given: Any) -> dict[str, Any] | None:
    """Return the fields of a row by name: of a mapping, a named tuple, a Series or a record; None for anything else."""
    if isinstance(given, Mapping):
        return {name: plain(value) for name, value in given.items() if isinstance(name, str)}
    row: Any = given
    names: Any = getattr(row, "_fields", None) or getattr(row, "__fields__", None)
    if isinstance(given, tuple) and names:
        return dict(zip(names, map(plain, row), strict=False))
    if getattr(row, "ndim", 0) == 0 and (names := _field_names(row)):
        return {name: plain(row[name]) for name in names}
    if getattr(row, "ndim", 0) == 1 and hasattr(row, "index") and hasattr(row, "items"):  # a Series
        return {name: plain(value) for name, value in row.items() if isinstance(name, str)}
    if not is_array(row) and callable(getattr(row, "keys", None)) and hasattr(row, "__getitem__"):  # sqlite3.Row
        return {name: plain(row[name]) for name in row.keys() if isinstance(name, str)}  # noqa: SIM118
    return None


def column_names(given: Any) -> list[str] | None:
    """Return the names of the columns of a frame of any library, or of a structured array; None for anything else."""
    if type(given) in (list, tuple):  # many short ones are asked for
        return None
    if fields := _field_names(given):
        return list(fields) if given.ndim else None
    with warnings.catch_warnings():  # polars warns that a lazy frame has to resolve its columns
        warnings.simplefilter("ignore")
        # pyarrow's `columns` are arrays, so its `column_names` come first; of a stream it has a schema alone.
        of: list[Any] = [getattr(given, attribute, None) for attribute in ("column_names", "columns", "colnames")]
        of.append(None if is_array(given) else getattr(getattr(given, "schema", None), "names", None))
        names = next((one for one in of if isinstance(one, Iterable) and not isinstance(one, str)), None)
        if names is None and hasattr(given, "__dataframe__"):
            names = given.__dataframe__().column_names()
    if names is None and hasattr(given, "__arrow_c_stream__") and not is_array(given):
        import pyarrow

        names = pyarrow.table(given).column_names
    return None if names is None else [str(name) for name in names]


def columns_of(frame: Any, wanted: Sequence[str]) -> list[list[Any]]:
    """Return the values of some columns of a frame, see `column_names`.

    Raises TypeError for a frame whose columns cannot be read, such as a lazy one.
    """
    try:
        columns = [frame[name] for name in wanted]
    except Exception:  # what a library raises for an index by name is its own
        columns = []
    listed = [one for one in map(values, columns) if one is not None]
    if len(listed) < len(wanted) and hasattr(frame, "__arrow_c_stream__"):  # a relation of duckdb, a stream of pyarrow
        import pyarrow

        table = pyarrow.table(frame)
        listed = [table[name].to_pylist() for name in wanted]
    if len(listed) < len(wanted):
        kind = type(frame)
        raise TypeError(
            f"the columns of a {kind.__module__}.{kind.__qualname__} cannot be read: give a pandas DataFrame of it, or "
            f"a list with the {' and '.join(wanted)} of each row"
        )
    return listed


def _nested(value: Any) -> Any:
    value = plain(value)
    if is_array(value) and named_fields(value) is None:
        return values(value)
    return [_nested(one) for one in value] if type(value) is list else value


def _field_names(value: Any) -> tuple[str, ...]:
    """Return the names of the fields of a structured array or record of numpy."""
    names = getattr(getattr(value, "dtype", None), "names", None)
    return tuple(names) if isinstance(names, tuple) else ()
