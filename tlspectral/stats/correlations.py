"""Partial rank correlations as in "Fingerprint, Not Blueprint" (FP, sections 4 to 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64, Int64

from tlspectral.stats.residuals import correlation_within_layers, residuals
from tlspectral.stats.values import Values, as_controls, as_values, complete_rows, require_aligned, require_known
from tlspectral.tables.html_summary import html_summary

RankMethod = Literal["hybrid", "rank"]
"""Ranks are taken of what the controls leave of the raw values (`hybrid`), or of all values first (`rank`)."""


@dataclass(frozen=True)
class PartialCorrelation:
    """A correlation of x and y after controls have been taken out of both.

    Attributes:
        statistic: the correlation, -1 to 1; NaN where it has no meaning.
        pvalue: two-sided, of Student's t. With `n - 2 - n_controls` degrees of freedom and rows taken as independent;
            within layers with `n_layers - 1`, layers taken as independent.
        n: rows used.
        n_dropped: rows left out because a value was NaN.
        n_controls: linearly independent controls; a constant or repeated one is not counted.
        method: `"hybrid"` or `"rank"`.
        reason: why the statistic is NaN, else None.
        n_layers: layers with two or more heads; None where rows were not compared within layers.
    """

    _repr_html_ = html_summary

    statistic: float
    pvalue: float
    n: int
    n_dropped: int
    n_controls: int
    method: str
    reason: str | None = None
    n_layers: int | None = None


def partial_spearman(
    x: Values,
    y: Values,
    controls: Values | pd.DataFrame,
    *,
    method: RankMethod = "hybrid",
    layers: Values | None = None,
) -> PartialCorrelation:
    """Return the rank correlation of x and y, the controls taken out of both (FP sections 5 to 7, Tables 2 and 3).

    Args:
        x, y: numbers, [rows].
        controls: Series or [rows], or several as DataFrame or [rows, controls]; none at all ([rows, 0]) gives the plain
            Spearman correlation.
        method: `"hybrid"`, FP's default: least squares with intercept of the raw x and y on the raw controls, then
            Spearman of the residuals. `"rank"`: x, y and every control as ranks first, least squares, then Pearson;
            unchanged by monotone maps of any variable. The two can differ materially where a variable has a heavy tail.
        layers: the layer of each row, [rows], of one model. Heads are then compared with heads of their own layer: the
            statistic is the correlation within layers, and its p does not take heads as independent.

    Returns:
        `PartialCorrelation`. Rows with a NaN or a masked value, or without a layer, are left out and counted. NaN with
        a reason where x or y is constant, is a linear function of the controls, or too few rows or layers are left.

    Raises:
        ValueError: different lengths, not numbers, an infinite value under `"hybrid"`, an unknown method, or pandas
            objects with the same index in different orders.

    What it does not establish: significance without `layers`. That p is the paper's and takes heads as independent: at
    nominal 5 % it rejects 8.2 to 9.9 % of simulated tables with an intra-class correlation of 0.2, and
    14.9 to 26.3 % with 0.4; with `layers` 3.4 to 6.3 % (docs/statistics.md). Nor causation, nor that a
    control has been taken out in full if it is noisy, or if x follows it by a curve: `"hybrid"` then rejects up to
    99.9 % of simulated tables without a relation, `"rank"` at most 8.7 % (docs/results/error_rates.md, last table).
    """
    require_known("method", method, get_args(RankMethod))
    require_aligned(x=x, y=y, controls=controls, layers=layers)
    columns = as_values(x, "x"), as_values(y, "y"), as_controls(controls)
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"x, y and controls must have as many rows each, found {[len(column) for column in columns]}")
    if layers is None:
        return partial_correlation(np.column_stack(columns), method)
    if len(layers) != len(columns[0]):
        raise ValueError(f"layers must have a label for each of {len(columns[0])} rows, found {len(layers)}")
    numbers = pd.factorize(np.asarray(layers), sort=True)[0]
    if isinstance(layers, np.ma.MaskedArray):
        numbers = np.where(np.ma.getmaskarray(layers), -1, numbers)
    return partial_correlation(np.column_stack(columns), method, numbers)


def partial_correlation(
    variables: Float64[np.ndarray, "rows variables"],
    method: RankMethod,
    layers: Int64[np.ndarray, "rows"] | None = None,
) -> PartialCorrelation:
    """Compute `partial_spearman` of a matrix whose columns are x, y and then the controls. A layer of -1 is none."""
    complete = complete_rows(variables)
    if layers is not None:
        complete &= layers >= 0
    used, n = variables[complete], int(complete.sum())
    if method == "hybrid" and np.isinf(used).any():
        raise ValueError(
            f"{int(np.isinf(used).any(1).sum())} rows hold an infinite value, to which no line can be fitted: "
            "leave them out, or use method='rank'"
        )
    counts: dict[str, Any] = {"n": n, "n_dropped": len(complete) - n, "method": method}
    if layers is not None:
        statistic, pvalue, n_controls, n_layers, reason = correlation_within_layers(used, layers[complete], method)
        return PartialCorrelation(statistic, pvalue, n_controls=n_controls, n_layers=n_layers, reason=reason, **counts)
    statistic, n_controls, reason = residual_correlation(used, method)
    pvalue = student_pvalue(statistic, n - 2 - n_controls)
    return PartialCorrelation(statistic, pvalue, n_controls=n_controls, reason=reason, **counts)


def residual_correlation(
    variables: Float64[np.ndarray, "rows variables"], method: RankMethod
) -> tuple[float, int, str | None]:
    """Return the statistic, the number of independent controls, and why the statistic is NaN. Rows have no NaN."""
    if len(variables) < 3:
        return math.nan, 0, f"{len(variables)} rows are too few for a correlation"
    if method == "rank":
        variables = scipy.stats.rankdata(variables, axis=0)
    remainder, n_controls, reason = residuals(variables[:, :2], variables[:, 2:], ("x", "y"))
    if len(remainder) - 2 - n_controls < 1:
        reason = f"{len(remainder)} rows are too few for {n_controls} controls"
    if reason is not None:
        return math.nan, n_controls, reason
    return _pearson(scipy.stats.rankdata(remainder, axis=0) if method == "hybrid" else remainder), n_controls, None


@dataclass(frozen=True, eq=False)
class FalseDiscovery:
    """Adjusted p-values, in the order the p-values came in.

    Attributes:
        q: Benjamini and Hochberg's, [tests]: the smallest false discovery rate at which the test is rejected.
        n: tests in the family, those with a NaN not counted.
    """

    _repr_html_ = html_summary

    q: Float64[np.ndarray, "tests"]
    n: int


def benjamini_hochberg(pvalues: Values) -> FalseDiscovery:
    """Control the false discovery rate of one family of tests by Benjamini and Hochberg (FP Table 4).

    Args:
        pvalues: [tests], from 0 to 1. A NaN is no test: its q is NaN and it does not count in the family.

    Raises:
        ValueError: not one-dimensional, or a p-value outside [0, 1].

    What it does not establish: control under negative dependence between the tests, or that the family was chosen
    before the p-values were seen.
    """
    given = as_values(pvalues, "pvalues")
    tested = ~np.isnan(given)
    p = given[tested]
    if ((p < 0) | (p > 1)).any():
        raise ValueError(f"p-values lie between 0 and 1, found {p[(p < 0) | (p > 1)][0]}")
    q = np.full(len(given), np.nan)
    if len(p):
        q[tested] = scipy.stats.false_discovery_control(p)
    return FalseDiscovery(q, len(p))


def _pearson(pair: Float64[np.ndarray, "rows 2"]) -> float:
    x, y = (pair - pair.mean(0)).T
    return float(np.clip(x @ y / math.sqrt((x @ x) * (y @ y)), -1, 1))


def student_pvalue(correlation: float, freedom: int) -> float:
    """Return a correlation's two-sided p by Student's t; NaN if the correlation is NaN or has no degree of freedom."""
    if math.isnan(correlation) or freedom < 1:
        return math.nan
    if abs(correlation) == 1:
        return 0.0
    return float(2 * scipy.stats.t.sf(abs(correlation) * math.sqrt(freedom / (1 - correlation**2)), freedom))
