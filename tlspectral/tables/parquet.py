"""Tables as parquet files that contain the meaning of their columns and their provenance."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tlspectral.errors import not_a, warn_caller
from tlspectral.errors.settings import checked_settings
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.head_columns import describe_columns
from tlspectral.tables.meanings import renamed_columns, warn_of_older
from tlspectral.tables.schema import columns_of, remember

_PARQUET = (".parquet", ".parq", ".pq")
_KEY = b"tlspectral"
_DIGEST_KEY = b"tlspectral_sha256"
_FORMAT = 2  # from 2 on with a digest of the file
# This placeholder stands in the file in place of the digest while the file is hashed.
_NO_DIGEST = hashlib.sha256(b"").hexdigest().encode()
# Errors that pyarrow and pandas raise for values that parquet cannot store.
_NO_PARQUET = (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError)


@checked_settings
def write_table(df: pd.DataFrame, path: str | os.PathLike[str], *, attrs_for_pandas: bool = True) -> None:
    """Write a table as parquet, with the meaning of its columns and its provenance; as CSV if the name ends in .csv.

    >>> import os, tempfile, tlspectral as tls
    >>> table = tls.frequency_table(tls.load_model("tiny-rope"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tls.write_table(table, f"{folder}/frequencies.csv")
    ...     sorted(os.listdir(folder))
    ['frequencies.columns.csv', 'frequencies.csv']

    Use parquet to keep a table: `tls.read_table` returns it unchanged, and `pandas.read_parquet` reads it too. CSV is
    for other programs. `heads.csv` has the numbers and `heads.columns.csv` the meaning of the columns. CSV has no
    provenance, and `tls.read_table` does not read it.

    Args:
        df: DataFrame of any columns. Columns that this package documents keep their documentation.
        path: file to write; an existing file is replaced. The file appears when it is complete, so an error leaves an
            older file unchanged.
        attrs_for_pandas: True lets `pandas.read_parquet` restore `df.attrs`. Give False for a file of a dataset,
            because pandas would give all rows the `attrs` of the first file. `tls.read_table` restores them in both
            cases. Default: True.

    Returns:
        None. A parquet file holds the table, the texts of its columns, and `df.attrs` (model, weights, settings).

    Raises:
        TypeError: `df` is not a DataFrame.
        ValueError: the name ends in another format, such as .xlsx; two columns have the same name; parquet cannot store
            a column or the index (values of several types, tensors, paths, bins of pandas.cut); or JSON cannot store
            `df.attrs` (numpy scalars are accepted; tuples come back as lists).
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: `path` is a folder.
        OSError: the disk is full; the message names `path`.

    Not established: that the numbers came from the recorded weights. Provenance is only a record. More: docs/table.md
    """
    if not isinstance(df, pd.DataFrame):
        raise TypeError(
            f"{not_a(df, 'a table')}: write_table needs a DataFrame; found {type(df).__name__}. Make one with "
            "pandas.DataFrame"
        )
    names = [str(name) for name in df.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several columns are called {', '.join(twice)}: rename them so that all names differ")
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        has_labels, file = any(name is not None for name in df.index.names), Path(path)
        described = (describe_columns(df), file.with_suffix(".columns.csv"), False)
        for table, at, index in (described, (df, file, has_labels)):
            with naming_file(at), whole_file(at) as partial:
                table.to_csv(partial, index=index)
        return
    if suffix[1:2].isalpha() and suffix not in _PARQUET:  # the ".5" of a name such as qwen2.5 is not a format
        raise ValueError(
            f"{path}: write_table writes .parquet and .csv, not {suffix}: give a name that ends in one of these; for "
            "another format use pandas, which leaves out the meaning of the columns"
        )
    data = table_bytes(df, attrs_for_pandas=attrs_for_pandas)
    with naming_file(path), whole_file(path) as partial:
        partial.write_bytes(data)


def table_bytes(df: pd.DataFrame, *, attrs_for_pandas: bool) -> bytes:
    """Return the bytes of a parquet file with the table `df`, its `attrs` and the meaning of its columns; equal tables
    give equal bytes.

    The schema's key `tlspectral` holds JSON with `format`, `provenance` (`df.attrs`) and `columns` (documentation by
    name). `tlspectral_sha256` is a checksum of the file. `attrs_for_pandas=True` stores `df.attrs` also where
    `pandas.read_parquet` finds them. Raises ValueError for values that parquet or JSON cannot store.
    """
    provenance = _json_value(df.attrs, "df.attrs")
    # pyarrow and pandas write attrs too, and neither accepts numpy scalars.
    frame = df.copy(deep=False)
    frame.attrs = provenance if attrs_for_pandas else {}
    try:
        table = pa.Table.from_pandas(frame)
        known = columns_of(provenance)
        documented = {name: known[name].texts() for name in table.column_names if name in known}
        fields = [
            field.with_metadata({key: value for key, value in documented[field.name].items() if key != "name"})
            if field.name in documented
            else field
            for field in table.schema
        ]
        description = json.dumps({"format": _FORMAT, "provenance": provenance, "columns": documented})
        metadata = {
            **(table.schema.metadata or {}),
            _KEY: description.encode(),
            b"PANDAS_ATTRS": json.dumps(frame.attrs).encode(),
            _DIGEST_KEY: _NO_DIGEST,
        }
        data = _parquet(pa.Table.from_arrays(table.columns, schema=pa.schema(fields, metadata=metadata)))
    except _NO_PARQUET as error:
        raise _unwritable(frame, error) from error
    return _with_digest(data, _NO_DIGEST, hashlib.sha256(data).hexdigest().encode())


def _parquet(table: pa.Table) -> bytes:
    """Return the bytes of a parquet file with this pyarrow table. Raises an error of pyarrow, or another class in
    `_NO_PARQUET`, if it cannot be written and read again.
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    data = sink.getvalue()
    _frame_of(pq.ParquetFile(pa.BufferReader(data)).read())
    return data.to_pybytes()


def _frame_of(table: pa.Table) -> pd.DataFrame:
    """Return a pyarrow table as a DataFrame, in which columns of lists hold Python lists instead of arrays."""
    frame = table.to_pandas()
    for field in table.schema:
        if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):  # pandas turns lists into arrays
            frame[field.name] = [None if row is None else row.tolist() for row in frame[field.name]]
    return frame


def _unwritable(frame: pd.DataFrame, error: Exception) -> ValueError:
    """Return (do not raise) a ValueError for `frame`, a table that parquet cannot store: it names the first such
    column, or the index, and its types.

    `error` is what pyarrow or pandas raised for the whole table.
    """
    empty = pd.DataFrame(index=range(len(frame)))
    held = {f"column {name}": frame[name] for name in frame.columns} | {"the index": frame.index.to_frame(index=False)}
    for where, values in held.items():
        flat = pd.DataFrame(values).reset_index(drop=True)
        try:
            _parquet(pa.Table.from_pandas(empty.join(flat.set_axis(range(flat.shape[1]), axis=1).rename(columns=str))))
        except _NO_PARQUET as refusal:
            kinds = sorted({type(value).__name__ for _, column in flat.items() for value in column})
            return ValueError(
                f"{where} holds {', '.join(kinds)}, which parquet cannot store ({refusal.args[0]}): give "
                "it values of one type (numbers, text or lists of them; astype(str) makes text), or leave it out"
            )
    return ValueError(f"parquet cannot store this table ({error}): give columns of numbers, text or lists of these")


@contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """In the block, add `path` as the file name to an operating system error that names no file, such as the error of a
    full disk.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@checked_settings
def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a parquet file that `tls.write_table` wrote.

    >>> import tempfile, tlspectral as tls
    >>> table = tls.frequency_table(tls.load_model("tiny-rope"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tls.write_table(table, f"{folder}/frequencies.parquet")
    ...     tls.read_table(f"{folder}/frequencies.parquet").equals(table)
    True

    Args:
        path: the parquet file.

    Returns:
        DataFrame with the values, dtypes and index that were written, and `df.attrs` (model, weights, settings).
        `tls.tables.describe_columns(df)` gives the meaning and unit of its columns. A warning names columns that mean
        something else since the table was made; columns that were renamed get their present name.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not parquet (CSV is not read), is damaged, was not written by `write_table`, or was
            written by a newer version of this package. A checksum finds damage of a single bit, except in files of
            version 0.1.0, which have no checksum.

    Not established: that the numbers came from the recorded weights. Provenance is only a record.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{not_a(path, 'the path of a table')}: give the path of a parquet file")
    described, table = _open(Path(path).expanduser())
    try:
        frame = _frame_of(table)
        frame.attrs = described["provenance"]
        now = renamed_columns(frame.attrs.get("table"))
        earlier = [name for name in now if name in frame]
        frame = frame.rename(columns=now)
        docs = described.get("columns")
        docs = {now.get(name, name): entry for name, entry in docs.items()} if isinstance(docs, dict) else docs
        remember(frame.attrs.get("table"), docs)
    except MemoryError:
        raise
    except Exception as error:  # pandas and pyarrow raise errors of many types for changed metadata
        raise _unreadable(path, error) from error
    if earlier:
        names = ", ".join(f"{name} is now {now[name]}" for name in earlier)
        warn_caller(f"{os.fspath(path)} was written by an earlier release, and its columns are renamed: {names}")
    warn_of_older(frame, os.fspath(path))
    return frame


def _open(path: Path) -> tuple[dict[str, Any], pa.Table]:
    """Check a parquet file, and return (its tlspectral metadata as a dict, its pyarrow table).

    Raises FileNotFoundError, or ValueError if it is not such a file, is damaged, or has a newer format.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a table: name the parquet file in it")
    if not path.exists() and re.match(r"[a-z][a-z0-9+.-]+:", str(path), re.IGNORECASE):
        raise FileNotFoundError(
            f"{path} is an address, and tables are read from files: fetch it, as by urllib.request.urlretrieve("
            "address, 'heads.parquet') or huggingface_hub.hf_hub_download(...), and give the local path. "
            "pandas.read_parquet(address) returns the numbers without provenance and meanings"
        )
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: check the name, or write it with tlspectral.write_table")
    if path.suffix.lower() == ".csv":
        raise ValueError(
            f"{path} is CSV, which has no provenance: read it with pandas.read_csv, or write the table as .parquet"
        )
    data = path.read_bytes()
    if data[:4] != b"PAR1":
        start = "is empty" if not data else f"starts with {data[:4]!r}"
        raise ValueError(f"{path} is not a parquet file (it {start}): give a file that write_table wrote")
    try:
        # Not pq.read_table, which would read folder names such as layer=3 as columns.
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        metadata = file.metadata.metadata or {}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, error) from error
    described = _described(path, metadata)
    if described["format"] > 1:
        digest = metadata.get(_DIGEST_KEY, b"")
        if hashlib.sha256(_with_digest(data, digest, _NO_DIGEST)).hexdigest().encode() != digest:
            raise _damaged(path, "its checksum differs")
    try:
        return described, file.read()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error


def _unreadable(path: str | os.PathLike[str], error: Exception) -> ValueError:
    """Return (do not raise) a ValueError for a file whose metadata cannot be read; `error` is the cause."""
    return ValueError(f"{path}: its metadata cannot be read ({error!r}): write the table again")


def _with_digest(data: bytes, before: bytes, after: bytes) -> bytes:
    """Return a copy of `data`, the bytes of a parquet file, in which the last occurrence of `before` is replaced by
    `after`; unchanged if `before` is empty or missing.

    The checksum stands in the footer, at the end of a parquet file.
    """
    start = data.rfind(before) if before else -1
    return data if start < 0 else data[:start] + after + data[start + len(before) :]


def _damaged(path: str | os.PathLike[str], why: object) -> ValueError:
    """Return (do not raise) a ValueError for a damaged file; `why` is the reason in words or an error."""
    return ValueError(f"{path} is a damaged or cut-off parquet file ({why}): write it again")


def _described(path: str | os.PathLike[str], metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Return the tlspectral part of a parquet file's metadata as a dict with the keys format, provenance and columns.

    `metadata` is the file's metadata, `path` its name in messages. Raises ValueError if the part is missing, cannot be
    read, or has a newer format.
    """
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
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if known and version > _FORMAT:
        raise ValueError(
            f"{path} has table format {version}; this version of tlspectral reads up to {_FORMAT}: upgrade tlspectral"
        )
    if not known or version < 1:
        raise ValueError(f"{path}: its tlspectral metadata has an unknown format ({version!r}): write the table again")
    return described


def _json_value(value: Any, where: str) -> Any:
    """Return a copy of `value` that JSON can store: plain numbers instead of numpy scalars, lists instead of tuples.

    Raises ValueError for a value that JSON cannot store. `where` is its place in messages, such as "df.attrs['seed']".
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        return value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}, but JSON keys must be text: use str(key)")
        return {str(key): _json_value(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item, f"{where}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, str):
        return str(value)
    raise ValueError(
        f"{where} is a {type(value).__name__}, which JSON cannot store: use text, numbers, lists and dictionaries, "
        "or remove it before writing"
    )
