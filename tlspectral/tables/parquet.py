"""Tables as parquet files that carry the meaning of their columns and where they come from."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from tlspectral.errors import warn_caller
from tlspectral.tables.atomic_writes import whole_file
from tlspectral.tables.head_columns import describe_columns
from tlspectral.tables.meanings import renamed_columns, warn_of_older
from tlspectral.tables.schema import columns_of, remember

_PARQUET = (".parquet", ".parq", ".pq")
_KEY = b"tlspectral"
_DIGEST_KEY = b"tlspectral_sha256"
_FORMAT = 2  # from 2 on with a digest of the file
# Stands for the digest while the file is hashed.
_NO_DIGEST = hashlib.sha256(b"").hexdigest().encode()
# What pyarrow and pandas raise for values that parquet cannot hold.
_NO_PARQUET = (pa.ArrowException, TypeError, ValueError, OverflowError, NotImplementedError)


def write_table(df: pd.DataFrame, path: str | os.PathLike[str], *, attrs_for_pandas: bool = True) -> None:
    """Write a table as parquet, with column docs and provenance in the schema metadata; as CSV to a name in .csv.

    >>> import os, tempfile, tlspectral as tls
    >>> table = tls.frequency_table(tls.load_model("tiny-rope"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tls.write_table(table, f"{folder}/frequencies.csv")
    ...     sorted(os.listdir(folder))
    ['frequencies.columns.csv', 'frequencies.csv']

    `df.attrs["table"]`, which the functions of this package set, names the table. Its columns carry their docs as field
    metadata; other columns, and all columns of a frame without a name, are kept without. The schema's key `tlspectral`
    holds JSON: `format`, `provenance` (`df.attrs`) and `columns` (the docs by name). pandas keeps `attrs` through
    selections and drops them in many joins. `pandas.read_parquet` reads the file as well. The file appears when it is
    complete: after an error or an interrupt an older file is still there. It carries checksums of its pages and, under
    `tlspectral_sha256`, one of itself, so that `read_table` refuses a damaged file.

    CSV is for other programs: `heads.csv` has the numbers, `heads.columns.csv` beside it the docs of its columns.
    Provenance is left out, and `read_table` does not read it.

    Args:
        df: table of any columns.
        path: file to write; an existing one is replaced.
        attrs_for_pandas: whether `pandas.read_parquet` finds `df.attrs` too. False for a file of a dataset: pandas
            would give all its rows the `attrs` of its first file. `read_table` finds them in either case.

    Raises:
        TypeError: `df` is no DataFrame.
        ValueError: the name has the ending of another format, such as .xlsx; two columns have one name; a column or the
            index holds values that parquet cannot hold and give back (of several types, tensors, paths, bins of
            pandas.cut); or `df.attrs` holds something that JSON cannot (numpy scalars are fine; tuples come back as
            lists).
        FileNotFoundError: the folder does not exist.
        IsADirectoryError: `path` is a folder.
        OSError: the disk is full; the message names `path`.

    Provenance says what the caller recorded. It does not prove that the numbers came from those weights.
    """
    if not isinstance(df, pd.DataFrame):
        raise TypeError(f"write_table writes a DataFrame; found {type(df).__name__}")
    names = [str(name) for name in df.columns]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several columns are called {', '.join(twice)}: give each column a name of its own")
    suffix = Path(path).suffix.lower()
    if suffix == ".csv":
        _write_csv(df, Path(path))
        return
    if suffix[1:2].isalpha() and suffix not in _PARQUET:  # not so the end of a name such as qwen2.5
        raise ValueError(
            f"{path}: write_table writes .parquet and .csv, not {suffix}: give one of these names; for another format "
            "use pandas, which leaves out what the columns mean"
        )
    data = table_bytes(df, attrs_for_pandas=attrs_for_pandas)
    with naming_file(path), whole_file(path) as partial:
        partial.write_bytes(data)


def table_bytes(df: pd.DataFrame, *, attrs_for_pandas: bool) -> bytes:
    """Return what `write_table` writes to a parquet file: equal bytes for equal tables. Raises ValueError too."""
    provenance = _json_value(df.attrs, "df.attrs")
    # pyarrow and pandas serialise attrs too, and neither takes numpy scalars.
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
    """Return the bytes of a parquet file. Raises one of `_NO_PARQUET` for a table that can be written and not read."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, write_page_checksum=True)
    data = sink.getvalue()
    _frame_of(pq.ParquetFile(pa.BufferReader(data)).read())
    return data.to_pybytes()


def _frame_of(table: pa.Table) -> pd.DataFrame:
    frame = table.to_pandas()
    for field in table.schema:
        if pa.types.is_list(field.type) or pa.types.is_large_list(field.type):  # pandas makes arrays of them
            frame[field.name] = [None if row is None else row.tolist() for row in frame[field.name]]
    return frame


def _unwritable(frame: pd.DataFrame, error: Exception) -> ValueError:
    """Return the error that names the first column, or the index, that parquet cannot hold, and what is in it."""
    empty = pd.DataFrame(index=range(len(frame)))
    held = {f"column {name}": frame[name] for name in frame.columns} | {"the index": frame.index.to_frame(index=False)}
    for where, values in held.items():
        flat = pd.DataFrame(values).reset_index(drop=True)
        try:
            _parquet(pa.Table.from_pandas(empty.join(flat.set_axis(range(flat.shape[1]), axis=1).rename(columns=str))))
        except _NO_PARQUET as found:
            kinds = sorted({type(value).__name__ for _, column in flat.items() for value in column})
            return ValueError(
                f"{where} holds {', '.join(kinds)}, which parquet cannot hold and give back ({found.args[0]}): give it "
                "values of one type (numbers, text or lists of them; astype(str) makes text), or leave it out"
            )
    return ValueError(f"parquet cannot hold this table ({error})")


def _write_csv(df: pd.DataFrame, path: Path) -> None:
    docs = describe_columns(df)
    has_labels = any(name is not None for name in df.index.names)
    for table, file, index in ((docs, path.with_suffix(".columns.csv"), False), (df, path, has_labels)):
        with naming_file(file), whole_file(file) as partial:
            table.to_csv(partial, index=index)


@contextmanager
def naming_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add `path` to an error of the operating system that names no file, such as the error of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def read_table(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Read a table that `write_table` wrote: the same values, dtypes, index and `df.attrs`.

    >>> import tempfile, tlspectral as tls
    >>> table = tls.frequency_table(tls.load_model("tiny-rope"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tls.write_table(table, f"{folder}/frequencies.parquet")
    ...     tls.read_table(f"{folder}/frequencies.parquet").equals(table)
    True

    Args:
        path: the parquet file.

    Returns:
        The table as it was written.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not one of ours (not parquet, damaged, or without our metadata), its metadata fit no
            table, or a newer version of this package wrote it. Damage is found by checksum, down to a single bit; files
            of version 0.1.0 have none.
    """
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
    except Exception as error:  # pandas and pyarrow raise what they please where metadata are not of their making
        raise _unreadable(path, error) from error
    if earlier:
        names = ", ".join(f"{name} is now {now[name]}" for name in earlier)
        warn_caller(f"{os.fspath(path)} was written by an earlier release, and its columns are renamed: {names}")
    warn_of_older(frame, os.fspath(path))
    return frame


def _open(path: Path) -> tuple[dict[str, Any], pa.Table]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a table: name the parquet file in it")
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: write it with tlspectral.write_table, or check the name")
    if path.suffix.lower() == ".csv":
        raise ValueError(
            f"{path} is CSV, which does not say where its numbers come from: read it with pandas.read_csv, or write "
            "the table as .parquet"
        )
    data = path.read_bytes()
    if data[:4] != b"PAR1":
        start = "is empty" if not data else f"starts with {data[:4]!r}"
        raise ValueError(f"{path} is not a parquet file (it {start}): read_table reads what write_table wrote")
    try:
        # Not pq.read_table: it would read folder names such as layer=3 as columns.
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
    return ValueError(f"{path}: its metadata cannot be read ({error!r}): write the table again")


def _with_digest(data: bytes, before: bytes, after: bytes) -> bytes:
    """Replace the digest in a file's bytes. It is searched from the end, where a parquet file has its footer."""
    start = data.rfind(before) if before else -1
    return data if start < 0 else data[:start] + after + data[start + len(before) :]


def _damaged(path: str | os.PathLike[str], why: object) -> ValueError:
    return ValueError(f"{path} is a damaged or cut-off parquet file ({why}): write it again")


def _described(path: str | os.PathLike[str], metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    """Read and check our part of the schema metadata."""
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
    """Turn numpy scalars in `value` into plain numbers. A ValueError names what JSON cannot hold and where it is."""
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
