"""Partial rank correlations as in "Fingerprint, Not Blueprint" (FP, sections 4 to 7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64, Int64

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.stats.residuals import correlation_within_layers, residuals
from tlspectral.stats.values import Values, as_controls, as_values, complete_rows, require_aligned, require_known
from tlspectral.tables.html_summary import html_summary

RankMethod = Literal["hybrid", "rank"]
"""Where ranks enter: "hybrid" ranks the residuals of the raw values, "rank" ranks all values before the regression."""


@dataclass(frozen=True)
class PartialCorrelation:
    """A rank correlation of x and y after controls were removed from both; `tls.stats.partial_spearman` returns it.

        heads = tls.analyze_heads(model)
        controls, layers = heads[["dir_frac"]], heads["layer"]
        result = tls.stats.partial_spearman(heads["D_head"], heads["prev"], controls, layers=layers)
        result.statistic, result.pvalue

    Here x and y are the columns `D_head` and `prev` of the head table, the control is `dir_frac`, and heads are
    compared within their layer.

    Attributes:
        statistic: the correlation, -1 to 1, or NaN.
        pvalue: two-sided p of Student's t. Without layers it has `n - 2 - n_controls` degrees of freedom and takes rows
            as independent. Within layers it has `n_layers - 1` degrees of freedom and takes layers as independent.
        n: rows used.
        n_dropped: rows left out because a value was NaN.
        n_controls: linearly independent controls; a constant or repeated control is not counted.
        method: "hybrid" (x and y were regressed on the controls, then the residuals ranked) or "rank" (x, y and the
            controls were ranked, then x and y regressed).
        reason: why the statistic is NaN, else None.
        n_layers: layers with two or more heads; None if rows were not compared within layers.

    Not established: causation; or significance, if rows depend on each other and no layers were given.
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


@checked_settings
def partial_spearman(
    x: Values,
    y: Values,
    controls: Values | pd.DataFrame,
    *,
    method: RankMethod = "hybrid",
    layers: Values | None = None,
) -> PartialCorrelation:
    """Return the rank correlation of x and y with controls removed from both.

    Use it to test whether two columns of a head table are related beyond a third. Give `layers` for a p-value that can
    be trusted. The method comes from "Fingerprint, Not Blueprint", sections 5 to 7.

    >>> import tlspectral as tls
    >>> x, y, control = [1, 2, 3, 4, 5, 7], [1, 3, 2, 5, 4, 6], [1, 3, 2, 4, 4, 7]
    >>> round(tls.stats.partial_spearman(x, y, control).statistic, 2)
    0.09

    Args:
        x, y: numbers, [rows].
        controls: numbers, [rows] or [rows, controls], or a DataFrame; [rows, 0] gives the plain Spearman correlation.
        method:
            - "hybrid" (default, as in the paper): regress the raw x and y on the raw controls, then rank the residuals.
            - "rank": rank x, y and every control first, regress, then take Pearson's correlation.
        layers: layer of each row, [rows], of one model. Heads are then compared only within their layer, and the
            p-value does not assume independent heads. Default: None.

    Returns:
        `PartialCorrelation` with `.statistic` (-1 to 1), `.pvalue` (two-sided t test), `.n`, `.n_dropped` (rows with a
            missing value or layer, left out), `.n_controls`, `.n_layers` and `.reason`. The statistic is NaN, with a
            reason, if x or y is constant or a linear function of the controls, or if too few rows or layers are left.

    Raises:
        ValueError: lengths differ, values are not numbers, a value is infinite under "hybrid", the method is unknown,
            or pandas objects have the same index in different orders.

    Not established: causation, or significance without `layers`: that p takes heads as independent and is too small. A
    noisy control, or a control that x follows along a curve, is not removed in full. More: docs/statistics.md
    """
    require_known("method", method, get_args(RankMethod))
    require_aligned(x=x, y=y, controls=controls, layers=layers)
    columns = as_values(x, "x"), as_values(y, "y"), as_controls(controls)
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            f"x, y and controls must have equally many rows, found {[len(column) for column in columns]}: choose the "
            "same rows of each"
        )
    if layers is None:
        return partial_correlation(np.column_stack(columns), method)
    if np.ndim(layers) != 1:
        raise ValueError(f"layers must be a list of one layer per row; found {shown(layers)}")
    if len(layers) != len(columns[0]):
        raise ValueError(
            f"layers has {len(layers)} entries and x has {len(columns[0])} rows: give the layer of each row"
        )
    numbers = pd.factorize(np.asarray(layers), sort=True)[0]
    if isinstance(layers, np.ma.MaskedArray):
        numbers = np.where(np.ma.getmaskarray(layers), -1, numbers)
    return partial_correlation(np.column_stack(columns), method, numbers)


def partial_correlation(
    variables: Float64[np.ndarray, "rows variables"],
    method: RankMethod,
    layers: Int64[np.ndarray, "rows"] | None = None,
) -> PartialCorrelation:
    """Return the `PartialCorrelation` of the first two columns of `variables`, with its other columns as controls.

    It has `statistic` (-1 to 1), `pvalue` and the numbers of rows, controls and layers used. `method`: "hybrid"
    regresses raw values on the controls and ranks the residuals; "rank" ranks the columns first. `layers`: layer of
    each row, -1 if unknown; heads are then compared within layers. None compares all rows. Rows with NaN or an unknown
    layer are left out. Raises ValueError for infinite values under "hybrid".
    """
    complete = complete_rows(variables)
    if layers is not None:
        complete &= layers >= 0
    used, n = variables[complete], int(complete.sum())
    if method == "hybrid" and np.isinf(used).any():
        raise ValueError(
            f"{int(np.isinf(used).any(1).sum())} rows have an infinite value, and method='hybrid' cannot fit a line to "
            "it: leave these rows out, or use method='rank'"
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
    """Return three things: the partial rank correlation (-1 to 1), the number of linearly independent controls, and the
    reason if the correlation is NaN (else None).

    `variables`: columns x, y and controls, without NaN. `method`: "hybrid" regresses raw columns on the controls and
    ranks the residuals; "rank" ranks all columns first.
    """
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
    """P-values adjusted by Benjamini and Hochberg, in the order of the input; `benjamini_hochberg` returns it.

        result = tls.stats.benjamini_hochberg([0.01, 0.02, 0.5])  # the p-values of one family of tests
        result.q, result.n

    Attributes:
        q: adjusted p-values [tests]: the smallest false discovery rate at which the test is rejected.
        n: number of tests in the family, without NaN.
    """

    _repr_html_ = html_summary

    q: Float64[np.ndarray, "tests"]
    n: int


def benjamini_hochberg(pvalues: Values) -> FalseDiscovery:
    """Adjust the p-values of one family of tests for the false discovery rate (Benjamini and Hochberg).

    >>> import tlspectral as tls
    >>> tls.stats.benjamini_hochberg([0.01, 0.02, 0.5]).q.round(2).tolist()
    [0.03, 0.03, 0.5]

    Use it if you test many heads at once. Tests with q below .05 have an expected share of false discoveries of 5 %.

    Args:
        pvalues: [tests], from 0 to 1. A NaN does not count as a test, and its q is NaN.

    Returns:
        `FalseDiscovery` with `.q`, the adjusted p-values [tests] from 0 to 1, and `.n`, the number of tests.

    Raises:
        ValueError: `pvalues` is not one-dimensional, or a value is outside [0, 1].

    Not established: control of this rate if tests depend on each other negatively, or if the family was chosen after
    the p-values were seen.
    """
    values = as_values(pvalues, "pvalues")
    tested = ~np.isnan(values)
    p = values[tested]
    if ((p < 0) | (p > 1)).any():
        raise ValueError(
            f"pvalues must lie between 0 and 1, found {p[(p < 0) | (p > 1)][0]}: give p-values, not scores"
        )
    q = np.full(len(values), np.nan)
    if len(p):
        q[tested] = scipy.stats.false_discovery_control(p)
    return FalseDiscovery(q, len(p))


def _pearson(pair: Float64[np.ndarray, "rows 2"]) -> float:
    """Return Pearson's correlation (-1 to 1) of the two columns of `pair`; neither column may be constant."""
    x, y = (pair - pair.mean(0)).T
    return float(np.clip(x @ y / math.sqrt((x @ x) * (y @ y)), -1, 1))


def student_pvalue(correlation: float, freedom: int) -> float:
    """Return the two-sided p of a correlation by Student's t with `freedom` degrees of freedom.

    The result is NaN if the correlation is NaN or `freedom` is below 1.
    """
    if math.isnan(correlation) or freedom < 1:
        return math.nan
    if abs(correlation) == 1:
        return 0.0
    return float(2 * scipy.stats.t.sf(abs(correlation) * math.sqrt(freedom / (1 - correlation**2)), freedom))
