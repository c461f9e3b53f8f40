"""Table files that `write_table` did not write: refused by name, in one kind of error, before memory is filled."""

import json
import random

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged_files import other_json

import tlspectral.tables.parquet as room
from tlspectral.tables import read_table, write_table

OURS = {"format": 1, "provenance": {"model": "tiny", "table": "analyze_heads", "seed": 0}, "columns": {}}


def forged(path, table, ours=OURS, **metadata):
    """Write a table with metadata of one's own, without a checksum, as version 0.1.0 wrote them."""
    ours = ours if isinstance(ours, bytes) else json.dumps(ours).encode()
    pandas = {name.encode(): json.dumps(value).encode() for name, value in metadata.items()}
    pq.write_table(table.replace_schema_metadata({b"tlspectral": ours, **pandas}), path)
    return path


def table_or_refusal(path):
    try:
        return read_table(path)
    except ValueError as error:
        return str(error)


def pandas_metadata():
    table = pa.Table.from_pandas(pd.DataFrame({"layer": [0, 1], "dir_frac": [0.5, 0.25], "name": ["a", "b"]}))
    return table, json.loads(table.schema.metadata[b"pandas"])


def without(key):
    return {name: value for name, value in pandas_metadata()[1].items() if name != key}


def nested(depth):
    return b'{"format": 1, "provenance": {"a": ' + b"[" * depth + b"]" * depth + b"}}"


@pytest.mark.parametrize(
    ("given", "words"),
    [({"pandas": without("columns")}, r"KeyError\('columns'\)"), ({"ours": nested(900)}, "RecursionError"),
     ({"ours": nested(100_000)}, "RecursionError")],
    ids=["key", "900", "100,000"],
)  # fmt: skip
def test_a_file_without_a_checksum_is_read_or_it_is_named_why_its_metadata_cannot(tmp_path, given, words):
    table, pandas = pandas_metadata()
    path = forged(tmp_path / "heads.parquet", table, pandas=pandas)
    pd.testing.assert_frame_equal(read_table(path), table.to_pandas())
    forged(path, table, **given)
    with pytest.raises(ValueError, match=rf"heads.parquet: its metadata cannot be read \({words}"):
        read_table(path)


@pytest.mark.parametrize("key", ["tlspectral", "pandas"])
def test_changed_metadata_end_in_a_table_or_a_refusal_by_name(tmp_path, key):
    table, pandas = pandas_metadata()
    path, refused = tmp_path / "heads.parquet", 0
    for seed in range(60):
        changed = other_json(json.dumps(OURS if key == "tlspectral" else pandas).encode(), random.Random(seed))
        metadata = {b"tlspectral": json.dumps(OURS).encode(), b"pandas": json.dumps(pandas).encode()}
        pq.write_table(table.replace_schema_metadata({**metadata, key.encode(): changed}), path)
        found = table_or_refusal(path)
        if isinstance(found, str):
            assert str(path) in found
            refused += 1
    assert refused > 8


# --- small files of large tables ---


@pytest.mark.slow
def test_repeated_numbers_that_fill_memory_are_refused_before_they_are_read(tmp_path, monkeypatch):
    """140 million rows of one number: 1.1 GB in memory from 0.5 MB."""
    rows = pa.chunked_array([pa.array(np.zeros(4_000_000, dtype=np.int64))] * 35)
    path = forged(tmp_path / "heads.parquet", pa.table({"layer": rows}))
    assert path.stat().st_size < 1_000_000
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_, **__: pytest.fail("the table was read"))
    with pytest.raises(ValueError, match=r"heads.parquet has .* bytes and its table would take some 1,120,000,000 in"):
        read_table(path)


def test_a_repeated_text_that_fills_memory_is_refused_before_it_is_repeated(tmp_path, monkeypatch):
    """A text of a million characters in 100 rows: 100 MB in memory from 48 kB, here more than the bound."""
    path = forged(tmp_path / "heads.parquet", pa.table({"name": ["x" * 10**6] * 100}))
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(room, "_MEMORY", 2**26)
    read, sizes = pq.ParquetFile.read, []

    def noting_size(*arguments, **options):
        table = read(*arguments, **options)
        sizes.append(table.nbytes)
        return table

    monkeypatch.setattr(pq.ParquetFile, "read", noting_size)
    with pytest.raises(ValueError, match=r"its table would take some 101,\d{3},\d{3} in memory"):
        read_table(path)
    assert sizes[0] < 2e6  # the text once
    assert len(sizes) == 1


def test_large_and_repetitive_tables_that_were_measured_are_read(tmp_path, monkeypatch):
    """No bound on the growth applies below 1 GiB, and a table with one measured column stays below it."""
    constant = pd.DataFrame({"layer": np.zeros(2_000_000, dtype=int), "mode": "prompt"})
    write_table(constant, tmp_path / "constant.parquet")
    assert (tmp_path / "constant.parquet").stat().st_size * 500 < constant["layer"].nbytes
    assert len(read_table(tmp_path / "constant.parquet")) == 2_000_000
    monkeypatch.setattr(room, "_MEMORY", 0)
    wide = pd.DataFrame({f"c{index}": np.zeros(20_000) for index in range(90)} | {"mode": "prompt" * 20})
    write_table(wide.assign(score=np.random.default_rng(0).normal(size=20_000)), tmp_path / "wide.parquet")
    assert len(read_table(tmp_path / "wide.parquet")) == 20_000
    with pytest.raises(ValueError, match="as no table of measured numbers does"):
        read_table(tmp_path / "constant.parquet")
