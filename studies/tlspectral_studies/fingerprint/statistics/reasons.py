"""Rows as a table, and why a row of a table has no number."""

from typing import Any

import pandas as pd

from tlspectral.tables.schema import Schema, columns

REASONS = columns("""
    n_dropped | count | Heads left out because a value is NaN.
    reason    | text  | Why a number of the row is NaN; None where none is.
""")


def documented(rows: list[dict[str, Any]], schema: Schema) -> pd.DataFrame:
    """Return the rows as the schema's table: what a row lacks is NaN, an empty `reason` None."""
    frame = pd.DataFrame(rows, columns=[column.name for column in schema.columns])
    return schema.frame(reasons_as_objects(frame) if "reason" in frame else frame)


def reasons_as_objects(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with None, not NaN, where the column `reason` is empty."""
    reasons = table["reason"].astype(object)
    return table.assign(reason=reasons.where(reasons.notna(), None))
