"""Two groups, of models or heads: permutations and ranks with ties against enumeration, effect sizes, overlaps."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from heads_of_models import MEDIANS, SCHEMES, heads_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tlspectral_studies.fingerprint.printed_pvalues import gap_pvalue
from tlspectral_studies.fingerprint.statistics import (
    hypergeometric_overlap,
    leave_one_model_out,
    mann_whitney,
    top_k_sensitivity,
)

from tlspectral.stats import model_permutation_test, top_head_percentile

pytestmark = pytest.mark.lowest

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


@given(x=few, y=few)
@invariant
def test_p_of_a_gap_is_the_share_of_labelings_with_one_as_wide(x, y):
    """As the paper printed it; its other p- and q-values come out in the table of replication."""
    found = model_permutation_test(x, y)
    upper, lower = (x, y) if min(x) - max(y) == found.gap else (y, x)
    pooled, wide = [*upper, *lower], []
    for chosen in itertools.combinations(range(len(pooled)), len(upper)):
        rest = [value for place, value in enumerate(pooled) if place not in chosen]
        wide.append(min(pooled[place] for place in chosen) - max(rest) >= found.gap)
    assert gap_pvalue(x, y) == pytest.approx(np.mean(wide), rel=1e-12)
    if found.separated:
        assert gap_pvalue(x, y) == pytest.approx(1 / found.n_permutations)


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


@pytest.mark.slow
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


@alternatives
@pytest.mark.parametrize(("x", "y"), [([1, 2, 2], [2, 3, 5, 5]), ([4, 4, 4], [1, 1]), ([1, 2, 3, 4], [6, 7])])
def test_the_floor_is_the_smallest_p_of_any_labeling(alternative, x, y):
    pooled = np.array([*x, *y], dtype=float)
    every = []
    for chosen in itertools.combinations(range(len(pooled)), len(x)):
        others = np.setdiff1d(np.arange(len(pooled)), chosen)
        every.append(mann_whitney(pooled[[*chosen]], pooled[others], alternative=alternative).pvalue)
    assert mann_whitney(x, y, alternative=alternative).floor == min(every)


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
    assert np.isnan(found.floor)
    assert found.pvalue == scipy.stats.mannwhitneyu(x, y, method="asymptotic").pvalue
    one_more = mann_whitney([3.0], np.arange(5000.0))
    assert one_more.pvalue == pytest.approx(2 * 5 / 5001, rel=1e-9)
    alike = mann_whitney([1.0] * 200, [1.0] * 200)
    assert (alike.pvalue, alike.rank_biserial) == (1, 0)
    dropped = mann_whitney([1, 2, np.nan], pd.Series([3, None, 4, 5]))
    assert (dropped.n, dropped.n_x, dropped.n_y, dropped.n_dropped) == (5, 2, 3, 2)
    assert dropped.pvalue == mann_whitney([1, 2], [3, 4, 5]).pvalue


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
    assert found.floor == hypergeometric_overlap(population, marked, drawn, min(marked, drawn)).pvalue
    assert (found.statistic, found.n) == (overlap, population)
