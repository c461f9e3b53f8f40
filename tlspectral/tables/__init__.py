"""Documented tables, their files, and long work in parts.

Only looking up the tables of other rooms loads torch and TransformerLens."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral.tables.atomic_writes import whole_file
    from tlspectral.tables.every_table import describe_table, every_schema
    from tlspectral.tables.head_columns import (
        COLUMNS,
        EXTRA_COLUMNS,
        HEAD_COLUMNS,
        LATENT_COLUMNS,
        describe_columns,
    )
    from tlspectral.tables.joining import join
    from tlspectral.tables.parquet import read_table, write_table
    from tlspectral.tables.parts import PartFolder, open_parts
    from tlspectral.tables.schema import Column, Schema
    from tlspectral.tables.sharing import shard
    from tlspectral.tables.stacking import bundled, stacked, unbundled
    from tlspectral.tables.work import backend_configured, finished_parts, workers_kept
    from tlspectral.tables.work_part import PartFailure, WorkPart

__all__ = [
    "COLUMNS",
    "EXTRA_COLUMNS",
    "HEAD_COLUMNS",
    "LATENT_COLUMNS",
    "Column",
    "PartFailure",
    "PartFolder",
    "Schema",
    "WorkPart",
    "backend_configured",
    "bundled",
    "describe_columns",
    "describe_table",
    "every_schema",
    "finished_parts",
    "join",
    "open_parts",
    "read_table",
    "shard",
    "stacked",
    "unbundled",
    "whole_file",
    "workers_kept",
    "write_table",
]

# `analyze_heads` without a folder needs neither files nor the other tables.
__getattr__, __dir__ = lazy_names(__name__)
