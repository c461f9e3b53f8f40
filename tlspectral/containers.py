"""Read lists, arrays and frames of any library as Python values.

A container is recognised by its methods, not by its type, so that no library has to be imported: an array can be turned
into a list, and a frame has columns with names.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

_TO_LIST = ("tolist", "to_pylist", "to_list")  # numpy, torch and pandas; pyarrow; polars


def plain(value: Any) -> Any:
    """Return a single number or text of numpy, torch or pyarrow as a Python value; return other values unchanged.

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
    """Return True for an array, tensor or column of any library with at least one axis; False for a list and others."""
    if isinstance(value, str | bytes | list | tuple | Mapping | Set):
        return False
    axes = getattr(value, "ndim", None)
    return axes > 0 if isinstance(axes, int) else any(hasattr(value, method) for method in _TO_LIST)


def values(given: Any) -> list[Any] | None:
    """Return the entries of a container (list, set, array, tensor or column of any library) as a new list; None for
    text, mappings, frames and single values.

    Arrays become nested lists, also arrays inside a column. Entries of a list stay as they are, but single numbers of a
    library become Python numbers.
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
    """Return True for a tuple or list of one-axis arrays, or a tuple of two lists: columns instead of rows.

    `np.where` and `np.unravel_index` return such columns: all layers, then all heads. Read as rows (layer, head), they
    would name other heads.
    """
    if not isinstance(given, list | tuple) or not given:
        return False
    if all(is_array(column) and getattr(column, "ndim", 1) == 1 and not named_fields(column) for column in given):
        return True
    return isinstance(given, tuple) and len(given) == 2 and all(isinstance(column, list) for column in given)


def named_fields(given: Any) -> dict[str, Any] | None:
    """Return the fields of a table row as a dict by name; None if the value is not a row.

    A row is a mapping, a named tuple, a Series or a record.
    """
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
    """Return the column names of a frame of any library or of a structured array; None for any other value."""
    if type(given) in (list, tuple):  # a shortcut: this function is called for many short lists
        return None
    if fields := _field_names(given):
        return list(fields) if given.ndim else None
    with warnings.catch_warnings():  # polars warns that a lazy frame has to resolve its columns
        warnings.simplefilter("ignore")
        # In pyarrow `columns` are arrays, so `column_names` comes first; a stream of pyarrow has only a schema.
        listings: list[Any] = [getattr(given, attribute, None) for attribute in ("column_names", "columns", "colnames")]
        listings.append(None if is_array(given) else getattr(getattr(given, "schema", None), "names", None))
        names = next((names for names in listings if isinstance(names, Iterable) and not isinstance(names, str)), None)
        if names is None and hasattr(given, "__dataframe__"):
            names = given.__dataframe__().column_names()
    if names is None and hasattr(given, "__arrow_c_stream__") and not is_array(given):
        import pyarrow

        names = pyarrow.table(given).column_names
    return None if names is None else [str(name) for name in names]


def columns_of(frame: Any, wanted: Sequence[str]) -> list[list[Any]]:
    """Return the columns named in `wanted` of a frame of any library: a list of values for each column.

    Raises TypeError if the columns cannot be read, such as for a lazy frame.
    """
    try:
        columns = [frame[name] for name in wanted]
    except Exception:  # each library raises its own error for an index by name
        columns = []
    listed = [column for column in map(values, columns) if column is not None]
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
    """Return a cell of an array as a Python value; an array in it becomes a list."""
    value = plain(value)
    if is_array(value) and named_fields(value) is None:
        return values(value)
    return [_nested(entry) for entry in value] if type(value) is list else value


def _field_names(value: Any) -> tuple[str, ...]:
    """Return the field names of a structured array or record of numpy; () for other values."""
    names = getattr(getattr(value, "dtype", None), "names", None)
    return tuple(names) if isinstance(names, tuple) else ()
