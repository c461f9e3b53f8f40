"""Means over seeds with t intervals, paired differences between arms of the same seeds, and shares of runs."""

import math

import numpy as np
import pandas as pd
import scipy.stats

from tlspectral.tables.head_columns import HEAD_COLUMNS
from tlspectral.tables.schema import columns

_LEVEL = 0.95

RUN_COLUMNS = (
    *columns("""
        seed | index       | Seed of the run's initial weights and training data; runs of one seed share both.
        step | step        | Gradient steps done.
        low  | of the mean | Lower end of the 95 % t interval of the mean; NaN for one seed.
        high | of the mean | Upper end of that interval.
        n    | count       | Seeds.
    """),
    *HEAD_COLUMNS,
)
"""What tables of runs share, for `columns(text, shared)`, the head table's columns among it."""


def t_interval(values: pd.Series) -> dict[str, float]:
    """`mean, low, high, n`: Student's 95 % interval of the mean of independent seeds; NaN ends for one seed."""
    numbers = np.asarray(values, dtype=float)
    n = len(numbers)
    mean = float(numbers.mean()) if n else math.nan
    if n < 2:
        return {"mean": mean, "low": math.nan, "high": math.nan, "n": n}
    reach = float(scipy.stats.t.ppf(0.5 + _LEVEL / 2, n - 1) * numbers.std(ddof=1) / math.sqrt(n))
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "n": n}


def mean_by(table: pd.DataFrame, by: list[str], measures: list[str]) -> pd.DataFrame:
    """Columns `by` and the means of `measures` in each group, in the order in which groups first come."""
    return pd.DataFrame(table.groupby(by, sort=False)[measures].mean()).reset_index()


def intervals(table: pd.DataFrame, by: list[str], measure: str) -> pd.DataFrame:
    """`t_interval` of a column over the seeds of each group: columns `by`, `mean, low, high, n`."""
    rows = [t_interval(group[measure]) for _, group in table.groupby(by, sort=False)]
    return table[by].drop_duplicates(ignore_index=True).join(pd.DataFrame(rows))


def paired_differences(table: pd.DataFrame, by: list[str], measure: str, *, reference: str) -> pd.DataFrame:
    """Each arm less the reference arm on the same seed, as `intervals` over seeds.

    Args:
        table: columns `arm, seed`, `by` and `measure`; one row per arm, seed and group.
        by: what else must agree in a pair.
        measure: the column that is compared.
        reference: the arm that is subtracted; it has no rows in the result.

    Returns:
        Columns `by`, `arm`, `mean, low, high, n`.

    What it does not establish: no difference where the interval holds 0. Five seeds show large ones only.
    """
    other = table.loc[table["arm"] == reference, [*by, "seed", measure]]
    paired = table[table["arm"] != reference].merge(other, on=[*by, "seed"], suffixes=("", "_reference"))
    paired["difference"] = paired[measure] - paired[f"{measure}_reference"]
    return intervals(paired, [*by, "arm"], "difference")


def means_and_differences(table: pd.DataFrame, by: list[str], measure: str, *, reference: str) -> pd.DataFrame:
    """`intervals` of each arm, and beside them the paired difference to the reference arm, NaN for itself.

    Returns:
        Columns `by`, `arm`, `mean, low, high, n, difference, difference_low, difference_high`.
    """
    names = {"mean": "difference", "low": "difference_low", "high": "difference_high"}
    differences = paired_differences(table, by, measure, reference=reference).rename(columns=names).drop(columns="n")
    return intervals(table, [*by, "arm"], measure).merge(differences, on=[*by, "arm"], how="left")


def equivalence(differences: pd.Series, margin: float) -> dict[str, float]:
    """Two one-sided t tests that the mean of independent paired differences lies within -margin to margin.

    Returns:
        `pvalue`, the larger of the two p; `bound`, the smallest margin that the test would pass at the 5 % level.
    """
    numbers = np.asarray(differences, dtype=float)
    n, mean, error = len(numbers), abs(float(numbers.mean())), float(scipy.stats.sem(numbers))
    bound = mean + float(scipy.stats.t.ppf(_LEVEL, n - 1)) * error
    return {"pvalue": float(scipy.stats.t.sf((margin - mean) / error, n - 1)), "bound": bound}


def share_interval(successes: int, runs: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of independent runs."""
    interval = scipy.stats.binomtest(successes, runs).proportion_ci(_LEVEL, method="wilson")
    return float(interval.low), float(interval.high)
