"""Mann-Whitney with ties against full enumeration, effect sizes, the class test."""

import itertools
import math
from inspect import unwrap

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.regression.linear_model import OLS

from tlspectral.studies.fingerprint.statistics import class_test, hodges_lehmann, mann_whitney, rank_biserial

invariant = settings(max_examples=60, derandomize=True)
# Few distinct values: ties within and between groups.
tied = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=6)
alternatives = pytest.mark.parametrize("alternative", ["two-sided", "less", "greater"])
OPPOSITE = {"two-sided": "two-sided", "less": "greater", "greater": "less"}

# Steps to formation in FP's Table 4.
APE_FREE = [600] * 5
ROPE_FREE = [1000, 900, 1000, 900, 900]
APE_SYM = [1400, 1600, 1800, 1900, 2000]
ROPE_SYM = [1400, 1400, 1800, 1600, 1600]
ROPE_IMAG = [1300, 1400, 1300, 1000, 1400]


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


@alternatives
@given(x=tied, y=tied)
@invariant
def test_naming_the_groups_the_other_way_changes_signs_alone(alternative, x, y):
    one, two = mann_whitney(x, y, alternative=alternative), mann_whitney(y, x, alternative=OPPOSITE[alternative])
    assert one.pvalue == pytest.approx(two.pvalue, rel=1e-12)
    assert one.statistic + two.statistic == len(x) * len(y)
    assert one.rank_biserial == pytest.approx(-two.rank_biserial, abs=1e-12)
    assert one.hodges_lehmann == -two.hodges_lehmann


@given(x=tied, y=tied)
@invariant
def test_a_monotone_map_changes_no_p(x, y):
    mapped = mann_whitney(np.exp(x), np.exp(y))
    assert mapped.pvalue == mann_whitney(x, y).pvalue


@given(x=tied, y=tied, shift=st.integers(-20, 20))
@invariant
def test_the_shift_moves_with_the_group(x, y, shift):
    assert hodges_lehmann(np.add(x, shift), y) == hodges_lehmann(x, y) + shift
    assert hodges_lehmann(np.add(x, shift), np.add(y, shift)) == hodges_lehmann(x, y)


@given(x=tied, y=tied)
@invariant
def test_effect_sizes_are_their_definitions(x, y):
    pairs = [(a, b) for a in x for b in y]
    assert rank_biserial(x, y) == pytest.approx(np.mean([np.sign(a - b) for a, b in pairs]), abs=1e-12)
    assert hodges_lehmann(x, y) == np.median([a - b for a, b in pairs])
    found = mann_whitney(x, y)
    assert found.rank_biserial == pytest.approx(rank_biserial(x, y), abs=1e-12)
    assert found.hodges_lehmann == hodges_lehmann(x, y)


@alternatives
def test_without_ties_it_is_scipys_exact_test(alternative):
    x, y = np.random.default_rng(0).standard_normal((2, 14))
    x = x[:9] + 0.5
    found = mann_whitney(x, y, alternative=alternative)
    expected = scipy.stats.mannwhitneyu(x, y, alternative=alternative, method="exact").pvalue
    assert found.pvalue == pytest.approx(expected, rel=1e-10)


def test_many_labelings_are_still_counted_exactly():
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


def test_beyond_counting_it_is_asymptotic_and_says_so():
    rng = np.random.default_rng(2)
    x, y = np.round(rng.normal(0.3, 1, 150), 1), np.round(rng.normal(0, 1, 250), 1)
    found = mann_whitney(x, y)
    assert found.method.startswith("asymptotic")
    assert found.pvalue == scipy.stats.mannwhitneyu(x, y, method="asymptotic").pvalue
    one_more = mann_whitney([3.0], np.arange(5000.0))
    assert one_more.method.startswith("exact")
    assert one_more.pvalue == pytest.approx(2 * 5 / 5001, rel=1e-9)


@pytest.mark.parametrize(
    ("slow", "quick", "p", "effect", "shift"),
    [
        (ROPE_FREE, APE_FREE, 1 / 252, 1.0, 300),
        (APE_SYM, APE_FREE, 1 / 252, 1.0, 1200),
        (ROPE_SYM, ROPE_FREE, 1 / 252, 1.0, 600),
        (ROPE_IMAG, ROPE_FREE, 3 / 252, 0.92, 400),
    ],
    ids=["P1", "P3", "P4", "P2"],
)
def test_table_4_of_the_paper(slow, quick, p, effect, shift):
    found = mann_whitney(slow, quick, alternative="greater")
    assert found.pvalue == pytest.approx(p, rel=1e-12)
    assert found.rank_biserial == pytest.approx(effect)
    assert found.hodges_lehmann == shift


def test_groups_that_are_all_alike_differ_by_nothing():
    for size in (3, 200):
        found = mann_whitney([1.0] * size, [1.0] * size)
        assert found.pvalue == pytest.approx(1)
        assert found.rank_biserial == 0


def test_missing_values_are_counted_and_empty_groups_refused():
    found = mann_whitney([1, 2, np.nan], pd.Series([3, None, 4, 5]))
    assert (found.n, found.n_x, found.n_y, found.n_dropped) == (5, 2, 3, 2)
    assert found.pvalue == mann_whitney([1, 2], [3, 4, 5]).pvalue
    with pytest.raises(ValueError, match="group y holds no numbers"):
        mann_whitney([1, 2], [np.nan])
    with pytest.raises(ValueError, match="group x holds no numbers"):
        rank_biserial([], [1])
    with pytest.raises(ValueError, match="infinite"):
        hodges_lehmann([np.inf], [1])
    with pytest.raises(ValueError, match="alternative"):
        unwrap(mann_whitney)([1], [2], alternative="two.sided")  # past the check of annotations


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
    assert (found.n, found.n_class) == (80, above.sum())
    assert found.statistic > 0.5


def test_a_class_can_be_compared_without_controls():
    heads = heads_of(1)
    above = heads["prev"] > 0.2
    expected = rank_biserial(heads["D_head"][above], heads["D_head"][~above])
    assert class_test(heads, threshold=0.2, controls=()).statistic == expected


def test_the_threshold_itself_is_not_above_it():
    heads = heads_of(2)
    assert class_test(heads, threshold=heads["prev"].nlargest(4).min()).n_class == 3


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


def test_class_rows_with_nan_are_counted_and_infinite_ones_refused():
    heads = heads_of()
    heads.loc[[0, 1], "D_head"] = np.nan
    found = class_test(heads, threshold=0.3)
    assert (found.n, found.n_dropped) == (78, 2)
    heads.loc[5, "dir_frac"] = np.inf
    with pytest.raises(ValueError, match="infinite"):
        class_test(heads, threshold=0.3)
