"""Means of scores over questions and draws, and tests of early against late layers."""

import warnings
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64

WITH_ERRORS = ("s_pos", "s_sym", "exclusion_index", "logit_std")
_SCORES = (*WITH_ERRORS, "tau", "alpha_ess")


def over_draws(tables: list[list[pd.DataFrame]]) -> pd.DataFrame:
    """Mean over the queries of each draw, then mean and standard error over draws, row by row.

    Args:
        tables: one per draw and query, all with the same rows in the same order.

    Returns:
        DataFrame of the columns that name a row, then scores, with `_se` (NaN for one draw) except for `tau` and
        `alpha_ess`. Queries and draws without a score are left out.
    """
    names = tables[0][0].drop(columns=list(_SCORES))
    for table in (table for draw in tables for table in draw):
        if not table[list(names)].equals(names):
            raise ValueError("these tables do not have the same rows, so they cannot be averaged")
    columns = {name: names[name].to_numpy() for name in names}
    for score in _SCORES:
        values = np.array([[table[score].to_numpy(np.float64) for table in draw] for draw in tables])
        by_draw = _mean(values, axis=1)
        columns[score] = _mean(by_draw, axis=0)
        if score in WITH_ERRORS:
            columns[f"{score}_se"] = _standard_error(by_draw)
    return pd.DataFrame(columns)


def median_tests(heads: pd.DataFrame, n_layers: int) -> pd.DataFrame:
    """Mood's median test of each score between heads of the first half of the layers and the others.

    Args:
        heads: `layer, s_pos, s_sym`; heads without a score are left out.
        n_layers: the middle one of an odd number counts as late.

    Returns:
        `score, early_median, late_median, statistic, pvalue` (chi-square with Yates' correction). NaN where a half has
        no head, or where no head lies below or above the median of all.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3, footnote 2).

    What it does not establish: that depth is the cause. Heads of a layer are not independent, as the test assumes:
    at nominal 5 % it rejects 29.7 % of simulated tables with an intra-class correlation of 0.4 (docs/statistics.md).
    """
    rows = []
    for score in ("s_pos", "s_sym"):
        early, late = (
            heads.loc[half, score].dropna().to_numpy(np.float64)
            for half in (heads["layer"] < n_layers // 2, heads["layer"] >= n_layers // 2)
        )
        statistic = pvalue = np.nan
        both = np.concatenate([early, late])
        # Ties with the grand median count as below it.
        if len(early) and len(late) and (both > np.median(both)).any():
            tested: Any = scipy.stats.median_test(early, late)
            statistic, pvalue = float(tested.statistic), float(tested.pvalue)
        rows.append((score, _median(early), _median(late), statistic, pvalue))
    return pd.DataFrame(rows, columns=["score", "early_median", "late_median", "statistic", "pvalue"])


def pearson_of_scores(heads: pd.DataFrame) -> float:
    """Correlation of s_pos and s_sym over heads that have both; NaN where it is not defined."""
    scores = heads[["s_pos", "s_sym"]].dropna().to_numpy(np.float64)
    # Scores lie in [0, 1]; equal ones differ by rounding, 1e-16 or so.
    if len(scores) < 3 or np.ptp(scores, axis=0).min() < 1e-12:
        return float("nan")
    return float(np.corrcoef(scores.T)[0, 1])


def _mean(values: Float64[np.ndarray, "*shape"], axis: int) -> Float64[np.ndarray, "*rest"]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def _standard_error(by_draw: Float64[np.ndarray, "draws rows"]) -> Float64[np.ndarray, "rows"]:
    count = (~np.isnan(by_draw)).sum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Degrees of freedom", RuntimeWarning)
        return np.nanstd(by_draw, axis=0, ddof=1) / np.sqrt(np.maximum(count, 1))


def _median(values: Float64[np.ndarray, "heads"]) -> float:
    return float(np.median(values)) if len(values) else float("nan")
