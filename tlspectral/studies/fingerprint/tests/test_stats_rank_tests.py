"""Two groups by ranks: Mann-Whitney with ties against full enumeration, effect sizes, the class test, overlaps."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.regression.linear_model import OLS

from tlspectral.studies.fingerprint.printed_pvalues import class_pvalue, mann_whitney_pvalue
from tlspectral.studies.fingerprint.statistics import (
    class_test,
    hypergeometric_overlap,
    mann_whitney,
)

invariant = settings(max_examples=30, derandomize=True)
# Few distinct values: ties within and between groups.
tied = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=6)
OPPOSITE = {"two-sided": "two-sided", "less": "greater", "greater": "less"}
alternatives = pytest.mark.parametrize("alternative", OPPOSITE)


def u_of(x, y):
    return sum((a > b) + 0.5 * (a == b) for a in x for b in y)


def enumerated(x, y, alternative):
    """p by listing every labeling of the pooled values."""
    pooled, observed = [*x, *y], u_of(x, y)
    us = []
    for chosen in itertools.combinations(range(len(pooled)), len(x)):
        rest = [pooled[i] for i in range(len(pooled)) if i not in chosen]
        us.append(u_of([pooled[i] for i in chosen], rest))
    less, greater = np.mean(np.array(us) <= observed), np.mean(np.array(us) >= observed)
    return {"less": less, "greater": greater, "two-sided": min(1, 2 * min(less, greater))}[alternative]


@alternatives
@given(x=tied, y=tied)
@invariant
def test_it_is_the_enumeration_of_all_labelings(alternative, x, y):
    found = mann_whitney(x, y, alternative=alternative)
    # Shares of at most 924 labelings, added in another order.
    assert found.pvalue == pytest.approx(enumerated(x, y, alternative), rel=1e-12)
    assert found.statistic == u_of(x, y)
    assert found.method == f"exact over {math.comb(len(x) + len(y), len(x))} labelings, ties included"
    # Naming the groups the other way changes signs alone.
    other = mann_whitney(y, x, alternative=OPPOSITE[alternative])
    assert found.pvalue == pytest.approx(other.pvalue, rel=1e-12)
    assert found.statistic + other.statistic == len(x) * len(y)


@given(x=tied, y=tied)
@invariant
def test_effect_sizes_are_their_definitions(x, y):
    pairs = [(a, b) for a in x for b in y]
    found = mann_whitney(x, y)
    assert found.rank_biserial == pytest.approx(np.mean([np.sign(a - b) for a, b in pairs]), abs=1e-12)
    assert found.hodges_lehmann == np.median([a - b for a, b in pairs])


def test_many_labelings_are_counted_exactly_and_beyond_counting_it_is_asymptotic():
    rng = np.random.default_rng(1)
    x, y = np.round(rng.normal(0.8, 1, 15), 1), np.round(rng.normal(0, 1, 20), 1)
    found = mann_whitney(x, y)
    assert found.method.startswith("exact over 3247943160 labelings")
    one_sided = mann_whitney(x, y, alternative="greater").pvalue
    assert found.pvalue == pytest.approx(2 * one_sided, rel=1e-12)
    ranks = scipy.stats.rankdata([*x, *y])
    shuffled = np.random.default_rng(0).permuted(np.tile(ranks, (50_000, 1)), axis=1)[:, :15].sum(1)
    # p is .0028 and the standard error of the share .0002; a wrong tail or the ranks of y would be far off.
    assert abs((shuffled >= ranks[:15].sum()).mean() - one_sided) < 0.001
    x, y = np.round(rng.normal(0.3, 1, 150), 1), np.round(rng.normal(0, 1, 250), 1)
    found = mann_whitney(x, y)
    assert found.method.startswith("asymptotic")
    assert found.pvalue == scipy.stats.mannwhitneyu(x, y, method="asymptotic").pvalue
    one_more = mann_whitney([3.0], np.arange(5000.0))
    assert one_more.method.startswith("exact")
    assert one_more.pvalue == pytest.approx(2 * 5 / 5001, rel=1e-9)
    alike = mann_whitney([1.0] * 200, [1.0] * 200)
    assert (alike.pvalue, alike.rank_biserial) == (1, 0)
    dropped = mann_whitney([1, 2, np.nan], pd.Series([3, None, 4, 5]))
    assert (dropped.n, dropped.n_x, dropped.n_y, dropped.n_dropped) == (5, 2, 3, 2)
    assert dropped.pvalue == mann_whitney([1, 2], [3, 4, 5]).pvalue


def test_the_printed_p_is_exact_without_regard_to_ties_where_a_group_is_small():
    # P2 of the paper's Table 4; with ties counted it is 3 / 252.
    slow, quick = np.array([1300.0, 1400, 1300, 1000, 1400]), np.array([1000.0, 900, 1000, 900, 900])
    assert mann_whitney_pvalue(slow, quick, "greater") == pytest.approx(2 / 252, rel=1e-12)
    assert mann_whitney(slow, quick, alternative="greater").pvalue == pytest.approx(3 / 252, rel=1e-12)
    x, y = np.random.default_rng(0).standard_normal((2, 14))
    expected = scipy.stats.mannwhitneyu(x[:9], y, method="asymptotic").pvalue
    assert mann_whitney_pvalue(x[:9], y) == expected
    assert mann_whitney_pvalue(np.ones(3), np.ones(4)) == 1


# --- classes of heads ---


def heads_of(seed=0, n=80):
    rng = np.random.default_rng(seed)
    heads = pd.DataFrame({"dir_frac": rng.uniform(0.5, 0.8, n), "prev": rng.beta(0.3, 2, n)})
    heads["D_head"] = heads["dir_frac"] + 0.3 * (heads["prev"] > 0.3) + 0.1 * rng.standard_normal(n)
    return heads


def test_a_class_is_compared_by_its_residuals():
    heads = heads_of()
    found = class_test(heads, threshold=0.3)
    left = OLS(heads["D_head"], np.column_stack([np.ones(80), heads["dir_frac"]])).fit().resid.to_numpy()
    above = heads["prev"].to_numpy() > 0.3
    expected = mann_whitney(left[above], left[~above])
    assert found.statistic == pytest.approx(expected.rank_biserial, abs=1e-12)
    assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-10)
    assert class_pvalue(heads, 0.3) == pytest.approx(mann_whitney_pvalue(left[above], left[~above]), rel=1e-10)
    assert (found.n, found.n_class) == (80, above.sum())
    assert found.statistic > 0.5
    # The threshold itself is not above it.
    assert class_test(heads, threshold=heads["prev"].nlargest(4).min()).n_class == 3
    dropped = class_test(heads.assign(D_head=heads["D_head"].where(heads.index > 1)), threshold=0.3)
    assert (dropped.n, dropped.n_dropped) == (78, 2)


@pytest.mark.parametrize(
    ("change", "threshold", "reason"),
    [
        ({}, 2.0, "no head has prev above 2.0"),
        ({}, -1.0, "every head has prev above -1.0"),
        ({"D_head": 0.1}, 0.3, "D_head is constant"),
        ({"D_head": lambda h: 2 * h["dir_frac"] - 1}, 0.3, "D_head is a linear function of the controls"),
        ({"D_head": np.nan}, 0.3, "no head has prev"),
    ],
)
def test_a_class_without_a_comparison_is_nan_with_a_reason(change, threshold, reason):
    found = class_test(heads_of().assign(**change), threshold=threshold)
    assert reason in found.reason
    assert np.isnan([found.statistic, found.pvalue]).all()


# --- the overlap of two sets of heads ---


@given(st.data())
@invariant
def test_an_overlap_counts_the_sets_that_overlap_as_much(data):
    population = data.draw(st.integers(0, 9))
    marked, drawn = (data.draw(st.integers(0, population)) for _ in range(2))
    overlap = data.draw(st.integers(max(0, marked + drawn - population), min(marked, drawn)))
    hits = [sum(head < marked for head in chosen) for chosen in itertools.combinations(range(population), drawn)]
    found = hypergeometric_overlap(population, marked, drawn, overlap)
    assert found.pvalue == pytest.approx(np.mean(np.array(hits) >= overlap))
    assert found.expected == pytest.approx(np.mean(hits))
    assert (found.statistic, found.n) == (overlap, population)
