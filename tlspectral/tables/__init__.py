"""Tables whose columns are documented, their files, and long work that is stored in parts.

Importing this room does not load torch. Looking up a table of another room (`describe_table`) does.
"""

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

# Names are imported on first use, because `analyze_heads` without a folder needs no file code.
__getattr__, __dir__ = lazy_names(__name__)
