"""Rows as a documented table, and why a row of a table has no number."""

from typing import Any

import pandas as pd

from tlspectral.tables import named
from tlspectral.tables.column import Table


def documented(rows: list[dict[str, Any]], table: Table) -> pd.DataFrame:
    """Return the rows with all columns of a documented table, in their order, where an empty `reason` is None."""
    frame = pd.DataFrame(rows, columns=[column.name for column in table.columns])
    return named(reasons_as_objects(frame) if "reason" in frame else frame, table)


def reasons_as_objects(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with None, not NaN, where the column `reason` is empty."""
    reasons = table["reason"].astype(object)
    return table.assign(reason=reasons.where(reasons.notna(), None))
