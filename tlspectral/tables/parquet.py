"""Tables as parquet files that carry the meaning of their columns and where they come from."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tlspectral.tables.names import columns_of, remember
from tlspectral.tables.whole_file import whole_file

_KEY = b"tlspectral"
_FORMAT = 1


def write_table(df: pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write a table as parquet, with column docs and provenance in the schema metadata.

    `df.attrs["table"]`, which the functions of this package set, names the table. Its columns carry their docs as field
    metadata; other columns, and all columns of a frame without a name, are kept without. The schema's key `tlspectral`
    holds JSON: `format`, `provenance` (`df.attrs`) and `columns` (the docs by name). pandas keeps `attrs` through
    selections and drops them in many joins. `pandas.read_parquet` reads the file as well. The file appears when it is
    complete: an error or an interrupt leaves what was there.

    Args:
        df: table of any columns.
        path: file to write; an existing one is replaced.

    Raises:
        ValueError: `df.attrs` holds something that JSON cannot (numpy scalars are fine; tuples come back as lists).
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: `path` is a folder.

    Provenance says what the caller recorded. It does not prove that the numbers came from those weights.
    """
    provenance = _json_value(df.attrs, "df.attrs")
    # pyarrow and pandas serialise attrs too, and neither takes numpy scalars.
    frame = df.copy(deep=False)
    frame.attrs = provenance
    table = pa.Table.from_pandas(frame)
    known = columns_of(provenance)
    documented = {name: asdict(known[name]) for name in table.column_names if name in known}
    fields = [
        field.with_metadata({key: value for key, value in documented[field.name].items() if key != "name"})
        if field.name in documented
        else field
        for field in table.schema
    ]
    ours = json.dumps({"format": _FORMAT, "provenance": provenance, "columns": documented})
    metadata = {**(table.schema.metadata or {}), _KEY: ours.encode(), b"PANDAS_ATTRS": json.dumps(provenance).encode()}
    table = pa.Table.from_arrays(table.columns, schema=pa.schema(fields, metadata=metadata))
    with whole_file(path) as partial:
        pq.write_table(table, partial)


def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a table that `write_table` wrote: the same values, dtypes, index and `df.attrs`.

    Args:
        path: the parquet file.

    Returns:
        The table, as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not one of ours (not parquet, damaged, or without our metadata), or a newer version of
            this package wrote it.
    """
    described, table = _open(path)
    frame = table.to_pandas()
    frame.attrs = described["provenance"]
    remember(frame.attrs.get("table"), described.get("columns"))
    return frame


def _open(path: str | os.PathLike[str]) -> tuple[dict[str, Any], pa.Table]:
    if os.path.isdir(path):
        raise ValueError(f"{path} is a folder, not a table: name the parquet file in it")
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path} does not exist: write it with tlspectral.write_table, or check the name")
    with open(path, "rb") as stream:
        start = stream.read(4)
        if start != b"PAR1":
            found = "is empty" if not start else f"starts with {start!r}"
            raise ValueError(f"{path} is not a parquet file (it {found}): read_table reads what write_table wrote")
        stream.seek(0)
        try:
            # Not pq.read_table: it would read folder names such as layer=3 as columns.
            table = pq.ParquetFile(stream).read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} is a damaged or cut-off parquet file ({error}): write it again") from error
    return _described(path, table.schema.metadata or {}), table


def _described(path: str | os.PathLike[str], metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Our part of the schema metadata, checked."""
    if _KEY not in metadata:
        keys = ", ".join(sorted(key.decode(errors="replace") for key in metadata)) or "none"
        raise ValueError(
            f"{path} is a parquet file that tlspectral did not write (metadata found: {keys}): "
            "read it with pandas.read_parquet, or write it with tlspectral.write_table"
        )
    try:
        described = json.loads(metadata[_KEY])
        version = described["format"]
        known = isinstance(version, int) and isinstance(described["provenance"], dict)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}: its tlspectral metadata cannot be read ({error!r}): write the table again"
        ) from error
    if known and version > _FORMAT:
        raise ValueError(
            f"{path} has table format {version}; this version of tlspectral reads up to {_FORMAT}: upgrade tlspectral"
        )
    if not known or version < 1:
        raise ValueError(f"{path}: its tlspectral metadata has an unknown format ({version!r}): write the table again")
    return described


def _json_value(value: Any, where: str) -> Any:
    """`value` with numpy scalars as plain numbers; a ValueError names the place of what JSON cannot hold."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}: JSON keys are text, so use str(key)")
        return {str(key): _json_value(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, str):
        return str(value)
    raise ValueError(
        f"{where} is a {type(value).__name__}, which JSON cannot hold: use text, numbers, lists and dictionaries, "
        "or remove it before writing"
    )
