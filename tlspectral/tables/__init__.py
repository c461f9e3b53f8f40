"""The column dictionary and the files that carry it: needs neither torch nor TransformerLens."""

from tlspectral.tables.columns import (
    COLUMNS,
    EXTRA_COLUMNS,
    FREQUENCY_COLUMNS,
    HEAD_COLUMNS,
    Column,
    describe_columns,
)
from tlspectral.tables.parquet import read_table, write_table
from tlspectral.tables.whole_file import whole_file

__all__ = [
    "COLUMNS",
    "EXTRA_COLUMNS",
    "FREQUENCY_COLUMNS",
    "HEAD_COLUMNS",
    "Column",
    "describe_columns",
    "read_table",
    "whole_file",
    "write_table",
]
