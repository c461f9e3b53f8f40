"""Damaged table files without a checksum, which version 0.1.0 wrote: read, or refused by name."""

import json
import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from damaged_files import other_json

from tlspectral.tables import read_table

OURS = {"format": 1, "provenance": {"model": "tiny", "table": "analyze_heads", "seed": 0}, "columns": {}}
TABLE = pa.Table.from_pandas(pd.DataFrame({"layer": [0, 1], "dir_frac": [0.5, 0.25], "name": ["a", "b"]}))
PANDAS = json.loads(TABLE.schema.metadata[b"pandas"])


def written(path, **changed):
    """The table with metadata of one's own."""
    metadata = {"tlspectral": json.dumps(OURS).encode(), "pandas": json.dumps(PANDAS).encode()} | changed
    pq.write_table(TABLE.replace_schema_metadata(metadata), path)
    return path


def test_it_is_read_or_it_is_named_why_its_metadata_cannot(tmp_path):
    path = written(tmp_path / "heads.parquet")
    pd.testing.assert_frame_equal(read_table(path), TABLE.to_pandas())
    without = {name: value for name, value in PANDAS.items() if name != "columns"}
    written(path, pandas=json.dumps(without).encode())
    with pytest.raises(ValueError, match=r"heads.parquet: its metadata cannot be read \(KeyError\('columns'\)"):
        read_table(path)


@pytest.mark.parametrize("key", ["tlspectral", "pandas"])
def test_damaged_metadata_end_in_a_table_or_a_refusal_by_name(tmp_path, key):
    whole, path, refused = OURS if key == "tlspectral" else PANDAS, tmp_path / "heads.parquet", 0
    for seed in range(60):
        written(path, **{key: other_json(json.dumps(whole).encode(), random.Random(seed))})
        try:
            read_table(path)
        except ValueError as error:
            assert str(path) in str(error)  # noqa: PT017 - a table is right too
            refused += 1
    assert refused > 8
