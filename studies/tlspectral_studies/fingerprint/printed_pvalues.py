"""The p- and q-values of "Fingerprint, Not Blueprint" (FP) as FP computed them, where `tlspectral.stats` differs."""

from itertools import combinations

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.stats import PartialCorrelation
from tlspectral.stats.correlations import residuals, student_pvalue
from tlspectral.stats.permutation import Alternative
from tlspectral.stats.values import complete_rows, table_columns
from tlspectral_studies.fingerprint.statistics.rank_tests import scipys_pvalue

_FEW = 8  # with so many values or fewer in a group, FP's Mann-Whitney p is exact


def partial_pvalue(found: PartialCorrelation) -> float:
    """p of a partial correlation with n - 2 degrees of freedom: FP ignores the controls (Tables 2 and 3)."""
    return student_pvalue(found.statistic, found.n - 2)


def mann_whitney_pvalue(
    x: Float64[np.ndarray, "n_x"], y: Float64[np.ndarray, "n_y"], alternative: Alternative = "two-sided"
) -> float:
    """scipy's p: exact as if there were no ties with eight or fewer values in a group (Table 4), else asymptotic."""
    return scipys_pvalue(x, y, alternative, "exact" if min(len(x), len(y)) <= _FEW else "asymptotic")


def class_pvalue(heads: pd.DataFrame, threshold: float) -> float:
    """`mann_whitney_pvalue` of heads with prev above a threshold against the rest (section 6).

    Compared are the residuals of D_head after dir_frac, as in `class_test`.
    """
    variables = table_columns(heads, ["prev", "D_head", "dir_frac"])
    variables = variables[complete_rows(variables)]
    left, _, _ = residuals(variables[:, 1:2], variables[:, 2:], ["D_head"])
    in_class = variables[:, 0] > threshold
    return mann_whitney_pvalue(left[in_class, 0], left[~in_class, 0])


def gap_pvalue(x: Float64[np.ndarray, "n_x"], y: Float64[np.ndarray, "n_y"]) -> float:
    """Share of labelings of models with a gap at least as wide, in the direction seen (section 6).

    Where the groups are separated it is 1 over the number of labelings. It is no two-sided level: the direction is
    taken from the values.
    """
    if min(y) - max(x) > min(x) - max(y):
        x, y = y, x
    values, indices = np.concatenate([x, y]), range(len(x) + len(y))
    gaps = [values[list(upper)].min() - np.delete(values, upper).max() for upper in combinations(indices, len(x))]
    return float((np.array(gaps) >= min(x) - max(y)).mean())


def q_without_minimum(pvalues: Float64[np.ndarray, "tests"]) -> Float64[np.ndarray, "tests"]:
    """`p n / rank` without the cumulative minimum of Benjamini and Hochberg, equal p in the given order (Table 4).

    It can rank two tests against the order of their p.
    """
    rank = np.empty(len(pvalues))
    rank[np.argsort(pvalues, kind="stable")] = np.arange(1, len(pvalues) + 1)
    return np.minimum(pvalues * len(pvalues) / rank, 1)
