"""Two groups, of models or heads: permutations and ranks with ties against enumeration, effect sizes, overlaps.

Beside them p- and q-values as the paper printed them.
"""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.regression.linear_model import OLS
from test_stats_models import MEDIANS, SCHEMES, heads_of

from tlspectral.stats import benjamini_hochberg, model_permutation_test, partial_spearman, top_head_percentile
from tlspectral.studies.fingerprint.printed_pvalues import (
    class_pvalue,
    gap_pvalue,
    mann_whitney_pvalue,
    partial_pvalue,
    q_without_minimum,
)
from tlspectral.studies.fingerprint.statistics import (
    class_test,
    hypergeometric_overlap,
    leave_one_model_out,
    mann_whitney,
    top_k_sensitivity,
)

invariant = settings(max_examples=30, derandomize=True)
# Few distinct values: ties within and between groups.
tied = st.lists(st.integers(0, 5).map(float), min_size=1, max_size=6)
few = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=5).map(np.array)
OPPOSITE = {"two-sided": "two-sided", "less": "greater", "greater": "less"}
alternatives = pytest.mark.parametrize("alternative", OPPOSITE)


def test_leaving_out_each_of_the_seven_models():
    found = leave_one_model_out(pd.Series(MEDIANS), SCHEMES)
    assert found["left_out"].tolist() == list(MEDIANS)
    assert found["separated"].all()
    assert found["reason"].isna().all()
    # Three and three without a model of the other schemes, four and two without one with RoPE.
    np.testing.assert_allclose(found["floor"], [2 / 20] * 4 + [1 / 15] * 3)
    np.testing.assert_allclose(found["pvalue"], found["floor"])
    assert found["gap"].min() == pytest.approx(0.527)
    alone = leave_one_model_out({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": True, "b": False, "c": False})
    assert alone["reason"].tolist() == ["a is the only model of its group", None, None]
    assert np.isnan(alone.loc[0, "pvalue"])
    assert (alone.loc[0, "separated"], alone.loc[1, "pvalue"]) == (False, 1)


def model_of(seed, sign):
    """Strong heads at the top (sign 1) or the bottom (-1) of the column."""
    heads = heads_of(seed)
    noise = np.random.default_rng(seed).normal(0, 0.05, len(heads))
    return heads.assign(D_head=sign * heads["prev"].rank() / len(heads) + noise)


def test_each_k_is_the_test_of_its_medians():
    tables = {f"rope{i}": model_of(i, 1) for i in range(2)} | {f"ape{i}": model_of(i + 5, -1) for i in range(3)}
    groups = {name: name[:-1] for name in tables}
    found = top_k_sensitivity(tables, groups, ks=(1, 3, 20))
    assert found["k"].tolist() == [1, 3, 20]
    for row in found.itertuples():
        medians = {name: top_head_percentile(table, k=row.k).statistic for name, table in tables.items()}
        rope, ape = ([medians[name] for name in tables if groups[name] == group] for group in ("rope", "ape"))
        expected = model_permutation_test(rope, ape)
        for name in ("pvalue", "floor", "gap", "separated"):
            assert getattr(row, name) == getattr(expected, name)
    assert found["separated"].tolist() == [True, True, False]
    for order in (tables, dict(reversed(tables.items()))):
        assert top_k_sensitivity(order, groups, ks=(1, 3))["upper"].tolist() == ["rope", "rope"]


# --- as printed ---


def test_controls_are_not_counted_in_the_printed_p():
    x, y, control = np.random.default_rng(0).standard_normal((3, 12))
    found = partial_spearman(x, y, control)
    r = found.statistic
    expected = 2 * scipy.stats.t.sf(abs(r) * np.sqrt(10 / (1 - r * r)), 10)
    assert partial_pvalue(found) == pytest.approx(expected, rel=1e-12)
    assert partial_pvalue(found) < found.pvalue


@given(x=few, y=few)
@invariant
def test_p_of_a_gap_is_the_share_of_labelings_with_one_as_wide(x, y):
    found = model_permutation_test(x, y)
    upper, lower = (x, y) if min(x) - max(y) == found.gap else (y, x)
    pooled, wide = [*upper, *lower], []
    for chosen in itertools.combinations(range(len(pooled)), len(upper)):
        rest = [value for place, value in enumerate(pooled) if place not in chosen]
        wide.append(min(pooled[place] for place in chosen) - max(rest) >= found.gap)
    assert gap_pvalue(x, y) == pytest.approx(np.mean(wide), rel=1e-12)
    if found.separated:
        assert gap_pvalue(x, y) == pytest.approx(1 / found.n_permutations)


@given(p=st.lists(st.floats(0, 1), min_size=1, max_size=12).map(np.array))
@invariant
def test_q_is_larger_only_where_the_minimum_was_left_out(p):
    assert (benjamini_hochberg(p).q <= q_without_minimum(p) * (1 + 1e-12)).all()


# --- ranks ---
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


def classed_heads(seed=0, n=80):
    rng = np.random.default_rng(seed)
    heads = pd.DataFrame({"dir_frac": rng.uniform(0.5, 0.8, n), "prev": rng.beta(0.3, 2, n)})
    return heads.assign(D_head=heads["dir_frac"] + 0.3 * (heads["prev"] > 0.3) + 0.1 * rng.standard_normal(n))


def test_a_class_is_compared_by_its_residuals():
    heads = classed_heads()
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
    found = class_test(classed_heads().assign(**change), threshold=threshold)
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
