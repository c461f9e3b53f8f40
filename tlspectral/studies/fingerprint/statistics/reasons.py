"""Why a row of a table has no number."""

import pandas as pd


def reasons_as_objects(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with None, not NaN, where the column `reason` is empty."""
    reasons = table["reason"].astype(object)
    return table.assign(reason=reasons.where(reasons.notna(), None))
