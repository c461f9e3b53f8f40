"""Groups of heads: the Mann-Whitney test exact with ties, a class against the others, the overlap with a circuit."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64, Int64

from tlspectral.stats.permutation import Alternative
from tlspectral.stats.residuals import residuals
from tlspectral.stats.values import Values, as_values, complete_rows, require_one_population, table_columns
from tlspectral.tables.html_summary import html_summary

# Additions in the count of labelings by rank sum; about a second.
_MOST_ADDITIONS = 3e8
# Counts of labelings are added in float64, whose range ends at 1.8e308.
_LARGEST_LOG_COUNT = 700.0


@dataclass(frozen=True)
class MannWhitney:
    """A Mann-Whitney test of two groups.

    Attributes:
        statistic: U of x: pairs in which x is larger, ties counted half.
        pvalue: exact over all labelings of the pooled values, ties included, where they can be counted; else
            asymptotic with the variance corrected for ties and for continuity. `method` says which.
        floor: the smallest exact pvalue that any labeling of these values could have had; NaN for an asymptotic one.
        rank_biserial: `2 U / (n_x n_y) - 1`, -1 to 1: the share of pairs with x > y less the share with x < y.
        hodges_lehmann: median of all differences x - y: the shift, in units of the values.
        n: values used.
        n_x, n_y: values used in each group.
        n_dropped: values left out because they were NaN.
        alternative: `"two-sided"`, `"less"` or `"greater"`, of x.
        method: how the p-value came about.
    """

    _repr_html_ = html_summary

    statistic: float
    pvalue: float
    floor: float
    rank_biserial: float
    hodges_lehmann: float
    n: int
    n_x: int
    n_y: int
    n_dropped: int
    alternative: str
    method: str


def mann_whitney(x: Values, y: Values, *, alternative: Alternative = "two-sided") -> MannWhitney:
    """Mann-Whitney test, exact also with ties ("Fingerprint, Not Blueprint", sections 5 and 6, Table 4).

    The null distribution of the rank sum is counted over all labelings of the pooled values, with their mid-ranks.
    `scipy.stats.mannwhitneyu(method="exact")` takes no account of ties, and `scipy.stats.permutation_test` lists the
    labelings one by one, of which 15 against 20 values have 3e9.

    Args:
        x, y: numbers of each group, [n_x] and [n_y]. NaN are left out and counted.
        alternative: `"greater"`: x tends to be larger than y. Two-sided: twice the smaller one-sided p, at most 1.

    Raises:
        ValueError: a group without numbers, or an unknown alternative.

    What it does not establish: a difference of medians, unless the groups differ by a shift alone; nor significance
    where values depend on each other, as heads of a model do.
    """
    if alternative not in ("two-sided", "less", "greater"):
        raise ValueError(f"alternative must be 'two-sided', 'less' or 'greater', not {alternative!r}")
    x_values, y_values, n_dropped = _groups(x, y)
    sizes, pooled = (len(x_values), len(y_values)), np.concatenate([x_values, y_values])
    ranks = scipy.stats.rankdata(pooled)
    u = float(ranks[: sizes[0]].sum() - sizes[0] * (sizes[0] + 1) / 2)
    exact = _exact_pvalues(np.rint(2 * ranks).astype(np.int64), sizes[0], alternative)
    return MannWhitney(
        statistic=u,
        pvalue=scipys_pvalue(x_values, y_values, alternative, "asymptotic") if exact is None else exact[0],
        floor=math.nan if exact is None else exact[1],
        rank_biserial=2 * u / math.prod(sizes) - 1,
        hodges_lehmann=float(np.median(x_values[:, None] - y_values)),
        n=sum(sizes),
        n_x=sizes[0],
        n_y=sizes[1],
        n_dropped=n_dropped,
        alternative=alternative,
        method="asymptotic, corrected for ties and continuity"
        if exact is None
        else f"exact over {math.comb(sum(sizes), sizes[0])} labelings, ties included",
    )


def _groups(x: Values, y: Values) -> tuple[Float64[np.ndarray, "n_x"], Float64[np.ndarray, "n_y"], int]:
    x_values, y_values = as_values(x, "x"), as_values(y, "y")
    given = len(x_values) + len(y_values)
    x_values, y_values = x_values[~np.isnan(x_values)], y_values[~np.isnan(y_values)]
    for name, group in (("x", x_values), ("y", y_values)):
        if not len(group):
            raise ValueError(f"group {name} holds no numbers")
        if np.isinf(group).any():
            raise ValueError(f"group {name} holds infinite values: their differences have no meaning")
    return x_values, y_values, given - len(x_values) - len(y_values)


def _exact_pvalues(
    doubled_ranks: Int64[np.ndarray, "n"], n_x: int, alternative: Alternative
) -> tuple[float, float] | None:
    """Share of all labelings with a rank sum at least as extreme, and the smallest such share of any labeling.

    None where there are too many labelings to count.

    `ways[j, s]` counts the sets of j values with doubled rank sum s, one value after another. This gives the same as
    listing all labelings, in steps that grow with the rank sum and not with the number of labelings.
    """
    n = len(doubled_ranks)
    total, sum_x = int(doubled_ranks.sum()), int(doubled_ranks[:n_x].sum())
    size = min(n_x, n - n_x)
    largest = int(np.sort(doubled_ranks)[n - size :].sum())
    log_count = math.lgamma(n + 1) - math.lgamma(size + 1) - math.lgamma(n - size + 1)
    if n * size * largest > _MOST_ADDITIONS or log_count > _LARGEST_LOG_COUNT:
        return None
    ways = np.zeros((size + 1, largest + 1))
    ways[0, 0] = 1
    for rank in doubled_ranks:
        if rank <= largest:
            ways[1:, rank:] += ways[:-1, : largest + 1 - rank]
    share = ways[size] / ways[size].sum()
    observed = sum_x if n_x == size else total - sum_x  # the count is of the smaller group
    low, high = float(share[: observed + 1].sum()), float(share[observed:].sum())
    possible = np.flatnonzero(share)
    lowest, highest = float(share[possible[0]]), float(share[possible[-1]])
    pvalues = []
    for below, above in ((low, high), (lowest, highest)):
        less, greater = (below, above) if n_x == size else (above, below)
        pvalues.append(min(1.0, {"less": less, "greater": greater, "two-sided": 2 * min(less, greater)}[alternative]))
    return pvalues[0], pvalues[1]


def scipys_pvalue(
    x: Float64[np.ndarray, "n_x"], y: Float64[np.ndarray, "n_y"], alternative: Alternative, method: str
) -> float:
    """p of `scipy.stats.mannwhitneyu`; 1 where all values are equal."""
    if (x == x[0]).all() and (y == x[0]).all():
        return 1.0  # scipy divides 0 by 0
    tested: Any = scipy.stats.mannwhitneyu(x, y, alternative=alternative, method=method)
    return float(tested.pvalue)


@dataclass(frozen=True)
class ClassTest:
    """A class of heads against the rest.

    Attributes:
        statistic: rank-biserial correlation of the residuals, class against rest: -1 to 1.
        pvalue: two-sided Mann-Whitney; exact over labelings where `method` says so.
        floor: the smallest such pvalue of any labeling; NaN for an asymptotic one.
        n: heads used.
        n_class: heads above the threshold.
        n_dropped: heads left out because a value was NaN.
        threshold: of the behaviour.
        method: how the p-value came about.
        reason: why numbers are NaN, else None.
    """

    _repr_html_ = html_summary

    statistic: float
    pvalue: float
    floor: float
    n: int
    n_class: int
    n_dropped: int
    threshold: float
    method: str
    reason: str | None = None


def class_test(heads: pd.DataFrame, *, threshold: float) -> ClassTest:
    """Compare previous-token heads with the others by residuals of D_head ("Fingerprint, Not Blueprint", section 6).

    Residuals are those of least squares with an intercept on `dir_frac`, over all heads.

    Args:
        heads: one row per head of one model, with `prev, D_head, dir_frac`.
        threshold: heads with `prev` larger than this are the class.

    Returns:
        `ClassTest`. Rows with a NaN are left out and counted. NaN with a reason where no head or every head is in the
        class, or D_head is constant or a linear function of dir_frac.

    Raises:
        ValueError: a column that the table lacks, heads of several models or steps, or infinite values.

    What it does not establish: a trend within the class; nor significance with heads of a layer depending on each
    other, which p takes as independent: at nominal 5 % it rejects 10.6 % of simulated tables with an intra-class
    correlation of 0.4 (docs/statistics.md). Residuals are of a line: if D_head follows `dir_frac` by a curve and `prev`
    depends on `dir_frac`, it rejects 5 to 99 % of simulated tables in which nothing else joins D_head and `prev`
    (docs/results/error_rates.md, last table).
    """
    variables = table_columns(heads, ["prev", "D_head", "dir_frac"])
    require_one_population(heads)
    complete = complete_rows(variables)
    variables = variables[complete]
    if np.isinf(variables[:, 1:]).any():
        raise ValueError("D_head or dir_frac holds infinite values, to which no line can be fitted")
    in_class = variables[:, 0] > threshold
    n, n_class = len(variables), int(in_class.sum())
    counts: dict[str, Any] = {"n": n, "n_class": n_class, "n_dropped": len(complete) - n}
    reason, remainder = None, variables[:, 1:2]
    if not in_class.any():
        reason = f"no head has prev above {threshold}"
    elif in_class.all():
        reason = f"every head has prev above {threshold}"
    else:
        remainder, _, reason = residuals(variables[:, 1:2], variables[:, 2:], ["D_head"])
    if reason is not None:
        nan = math.nan
        return ClassTest(nan, nan, nan, **counts, threshold=threshold, method="none", reason=reason)
    test = mann_whitney(remainder[in_class, 0], remainder[~in_class, 0])
    return ClassTest(
        statistic=test.rank_biserial,
        pvalue=test.pvalue,
        floor=test.floor,
        **counts,
        threshold=threshold,
        method=f"Mann-Whitney of residuals, {test.method}",
    )


@dataclass(frozen=True)
class HypergeometricOverlap:
    """Overlap of two sets of heads.

    Attributes:
        statistic: heads in both sets.
        expected: mean number of heads in both sets if one of them is drawn at random.
        pvalue: probability of at least `statistic` heads in both.
        floor: the smallest pvalue of sets of these sizes: all of the smaller set is in the larger one.
        n: heads altogether.
    """

    _repr_html_ = html_summary

    statistic: int
    expected: float
    pvalue: float
    floor: float
    n: int


def hypergeometric_overlap(population: int, marked: int, drawn: int, overlap: int) -> HypergeometricOverlap:
    """Probability that a random set of heads overlaps a marked one as much ("Fingerprint, Not Blueprint", section 5).

    Args:
        population: heads altogether.
        marked: heads of the circuit.
        drawn: heads picked, without replacement.
        overlap: heads that are both.

    Raises:
        ValueError: counts that cannot be: negative ones, a set larger than the population, an overlap that two sets of
            these sizes cannot have.

    What it does not establish: anything, if the circuit was written down after the picked heads were seen. Where heads
    of a layer resemble each other it rejects in up to 7.9 % (docs/statistics.md).
    """
    if not (0 <= marked <= population and 0 <= drawn <= population):
        raise ValueError(f"{marked} marked and {drawn} drawn heads do not fit into a population of {population}")
    least, most = max(0, marked + drawn - population), min(marked, drawn)
    if not least <= overlap <= most:
        raise ValueError(
            f"{marked} and {drawn} of {population} heads have {least} to {most} in common, and cannot have {overlap}"
        )
    chance = scipy.stats.hypergeom(population, marked, drawn)
    expected = marked * drawn / population if population else 0.0
    pvalue, floor = (min(1.0, float(chance.sf(common - 1))) for common in (overlap, most))
    return HypergeometricOverlap(overlap, expected, pvalue, floor, population)
