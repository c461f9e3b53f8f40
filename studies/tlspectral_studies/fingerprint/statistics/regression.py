"""The share of variance that columns add to a linear model."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.errors import require_package
from tlspectral.stats.values import complete_rows, table_columns
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class NestedRSquared:
    """Two nested least-squares models of one column.

    Attributes:
        r_squared_base: share of variance that the base columns explain.
        r_squared: share that base and added columns explain together.
        statistic: F of the added columns.
        pvalue: of that F, rows taken as independent.
        coefficients: of each added column in the larger model, in raw units; NaN where added columns are linear
            functions of each other or of the base, so that they are not determined.
        freedom: degrees of freedom of F, added columns and residual.
        n: rows used.
        n_dropped: rows left out because a value was NaN.
        reason: why numbers are NaN, else None.
    """

    _repr_html_ = html_summary

    r_squared_base: float
    r_squared: float
    statistic: float
    pvalue: float
    coefficients: Mapping[str, float]
    freedom: tuple[int, int]
    n: int
    n_dropped: int
    reason: str | None = None


def nested_r_squared(
    heads: pd.DataFrame, y: str, base: Sequence[str] | str, added: Sequence[str] | str
) -> NestedRSquared:
    """Share of variance before and after columns are added, and their F test ("Fingerprint, Not Blueprint", section 5).

    Args:
        heads: one row per head.
        y: the column to be explained.
        base: columns of the smaller model; none leaves its intercept.
        added: columns that the larger model has besides.

    Returns:
        `NestedRSquared`. Rows with a NaN are left out and counted. NaN with a reason where y is constant, the added
        columns are linear functions of the base, too few rows are left, or the larger model leaves nothing.

    Raises:
        ValueError: no added column, a column that the table lacks, or infinite values.

    What it does not establish: prediction on other heads (R squared never falls when columns are added); nor
    significance with heads of a layer depending on each other: with an intra-class correlation of 0.4 the F test
    rejects in 23.2 % of simulated tables without an effect (docs/statistics.md). `partial_spearman(layers=)` keeps 5 %.
    """
    base, added = ([names] if isinstance(names, str) else list(names) for names in (base, added))
    if not added:
        raise ValueError("name at least one column to add")
    variables = table_columns(heads, [y, *base, *added])
    complete = complete_rows(variables)
    variables, n = variables[complete], int(complete.sum())
    if np.isinf(variables).any():
        raise ValueError(
            f"one of the columns {[y, *base, *added]} holds infinite values, to which no line can be fitted"
        )
    counts = {"n": n, "n_dropped": len(complete) - n}
    if n < 3 or (variables[:, 0] == variables[0, 0]).all():
        reason = f"{n} rows are too few" if n < 3 else f"{y} is constant"
        nothing = dict.fromkeys(added, math.nan)
        return NestedRSquared(math.nan, math.nan, math.nan, math.nan, nothing, (0, 0), **counts, reason=reason)
    spread = variables[:, 1:].std(0)
    spread[spread <= 1e-13 * np.abs(variables[:, 1:]).max(0, initial=0)] = np.inf  # a constant explains nothing
    predictors = (variables[:, 1:] - variables[:, 1:].mean(0)) / spread
    smaller, larger = (_fit(variables[:, 0], predictors[:, :count]) for count in (len(base), len(base) + len(added)))
    freedom = int(larger.df_model - smaller.df_model), int(larger.df_resid)
    raw = larger.params[1 + len(base) :] / spread[len(base) :]
    if freedom[0] < len(added):
        raw = np.full(len(added), np.nan)
    reason = None
    if freedom[0] < 1:
        reason = f"{', '.join(added)} are linear functions of {', '.join(base) or 'a constant'}"
    elif freedom[1] < 1:
        reason = f"{n} rows are too few for {int(larger.df_model)} columns"
    elif larger.rsquared > 1 - 1e-14:
        reason = f"the columns explain {y} without a remainder"
    statistic, pvalue = (math.nan, math.nan) if reason is not None else larger.compare_f_test(smaller)[:2]
    return NestedRSquared(
        r_squared_base=float(smaller.rsquared),
        r_squared=float(larger.rsquared),
        statistic=float(statistic),
        pvalue=float(pvalue),
        coefficients={name: float(value) for name, value in zip(added, raw, strict=True)},
        freedom=freedom,
        **counts,
        reason=reason,
    )


def _fit(y: Float64[np.ndarray, "rows"], predictors: Float64[np.ndarray, "rows columns"]) -> Any:
    # statsmodels takes most of a second to import, which `import tlspectral.stats` should not cost.
    require_package("statsmodels", "A regression", "./studies, in a clone of the repository")
    from statsmodels.regression.linear_model import OLS

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `freedom` and `reason` show where columns depend on each other
        return OLS(y, np.column_stack([np.ones(len(y)), predictors])).fit()
