"""Rank correlations of columns of a head table, pair by pair."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64

from tlspectral.stats import benjamini_hochberg
from tlspectral.stats.values import complete_rows, require_columns, require_one_population, table_columns
from tlspectral.tables import schema
from tlspectral_studies.fingerprint.statistics.reasons import REASONS, documented

_LEVEL = 0.05

SPEARMAN_TABLE = schema.Schema(
    "spearman_table",
    schema.columns(
        """
        column      | label       | One column of the head table.
        against     | label       | The other column.
        statistic   | correlation | Spearman's rank correlation. NaN for a constant or fewer than three heads.
        pvalue      | probability | Two-sided p of no correlation, scipy's.
        q           | probability | pvalue after Benjamini and Hochberg, over all pairs of the table that have one.
        significant | flag        | Whether q is at or below .05.
        n           | count       | Heads that have both values.
        n_dropped, reason
        """,
        REASONS,
    ),
)


def spearman_table(heads: pd.DataFrame, columns: Sequence[str] | str, against: Sequence[str] | str) -> pd.DataFrame:
    """Spearman correlation of every column with every other, with the false discovery rate over the table (FP Table 1).

    Args:
        heads: one row per head, of one model at one step.
        columns: names, the rows of FP's Table 1.
        against: names, its columns.

    Returns:
        DataFrame, a pair a row. Columns: `column, against, statistic, pvalue, q, significant, n, n_dropped, reason`.

    Raises:
        ValueError: a column that the table lacks or that holds no numbers, or heads of several models or steps.

    What it does not establish: significance with heads of a layer depending on each other: p takes them as independent,
    and at nominal 5 % rejects 17.4 to 26.6 % of tables with an intra-class correlation of 0.4 (docs/statistics.md).
    `partial_spearman(x, y, np.empty((len(x), 0)), layers=)` does not.
    """
    columns, against = ([names] if isinstance(names, str) else list(names) for names in (columns, against))
    require_columns(heads, [*columns, *against])
    require_one_population(heads)
    rows = [
        {"column": column, "against": other} | _spearman(table_columns(heads, [column]), table_columns(heads, [other]))
        for column in columns
        for other in against
    ]
    table = documented(rows, SPEARMAN_TABLE)
    table["q"] = benjamini_hochberg(table["pvalue"]).q if len(table) else np.empty(0)
    table["significant"] = table["q"] <= _LEVEL
    return table


def _spearman(x: Float64[np.ndarray, "rows 1"], y: Float64[np.ndarray, "rows 1"]) -> dict[str, Any]:
    pair = np.column_stack([x, y])
    complete = complete_rows(pair)
    pair, n = pair[complete], int(complete.sum())
    result: dict[str, Any] = {"statistic": math.nan, "pvalue": math.nan, "n": n, "n_dropped": len(complete) - n}
    if n < 3:
        return result | {"reason": f"{n} rows are too few for a correlation"}
    if (pair == pair[0]).all(0).any():
        return result | {"reason": "a column is constant"}
    agreement: Any = scipy.stats.spearmanr(pair[:, 0], pair[:, 1])
    return result | {"statistic": float(agreement.statistic), "pvalue": float(agreement.pvalue), "reason": None}
