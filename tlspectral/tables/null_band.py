"""The random null of a whole model as one level and one band for all heads."""

import numpy as np
import pandas as pd


def null_band(heads: pd.DataFrame, metric: str) -> tuple[float, float] | None:
    """Return medians over heads of the mean and standard deviation of a metric's null; None where there is none.

    What it does not establish: the null of one head, which depends on its own singular values.
    """
    columns = [f"{metric}_null_{part}" for part in ("mean", "std")]
    if not set(columns) <= set(heads):
        return None
    # Without dropna, pandas 2 warns of a column that is empty.
    mean, deviation = (float(heads[column].dropna().median()) for column in columns)
    return (mean, deviation) if np.isfinite([mean, deviation]).all() else None
