"""Documented tables, their files, and long work in parts.

Only looking up the tables of other rooms loads torch and TransformerLens."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.tables.every_table import describe_table
    from tlspectral.tables.head_columns import describe_columns
    from tlspectral.tables.joining import join
    from tlspectral.tables.parquet import read_table, write_table
    from tlspectral.tables.sharing import shard

__all__ = [
    "describe_columns",
    "describe_table",
    "join",
    "read_table",
    "shard",
    "write_table",
]

# `analyze_heads` without a folder needs neither files nor the other tables.
__getattr__, __dir__ = lazy_names(__name__)
