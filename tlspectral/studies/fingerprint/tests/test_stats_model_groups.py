"""Two groups of models: each left out, other numbers of top heads, and p- and q-values as the paper printed them."""

import itertools

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from described import assert_described
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stats_models import MEDIANS, SCHEMES, heads_of

from tlspectral.stats import benjamini_hochberg, model_permutation_test, partial_spearman, top_head_percentile
from tlspectral.studies.fingerprint.printed_pvalues import gap_pvalue, partial_pvalue, q_without_minimum
from tlspectral.studies.fingerprint.statistics import leave_one_model_out, top_k_sensitivity

invariant = settings(max_examples=30, derandomize=True)
few = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=5).map(np.array)


def test_leaving_out_each_of_the_seven_models():
    found = leave_one_model_out(pd.Series(MEDIANS), SCHEMES)
    assert_described(found)
    assert found["left_out"].tolist() == list(MEDIANS)
    assert found["separated"].all()
    assert found["reason"].tolist() == [None] * 7
    # Three and three without a model of the other schemes, four and two without one with RoPE.
    np.testing.assert_allclose(found["floor"], [2 / 20] * 4 + [1 / 15] * 3)
    np.testing.assert_allclose(found["pvalue"], found["floor"])
    assert found["n_permutations"].tolist() == [20] * 4 + [15] * 3
    assert found["gap"].min() == pytest.approx(0.527)
    alone = leave_one_model_out({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": True, "b": False, "c": False})
    assert alone["reason"].tolist() == ["a is the only model of its group", None, None]
    assert np.isnan(alone.loc[0, "pvalue"])
    assert not alone.loc[0, "separated"]
    assert alone.loc[1, "pvalue"] == 1


def model_of(seed, sign):
    """Strong heads at the top (sign 1) or the bottom (-1) of the column."""
    heads = heads_of(seed)
    noise = np.random.default_rng(seed).normal(0, 0.05, len(heads))
    return heads.assign(D_head=sign * heads["prev"].rank() / len(heads) + noise)


def test_each_k_is_the_test_of_its_medians():
    tables = {f"rope{i}": model_of(i, 1) for i in range(2)} | {f"ape{i}": model_of(i + 5, -1) for i in range(3)}
    groups = {name: name[:-1] for name in tables}
    found = top_k_sensitivity(tables, groups, ks=(1, 3, 20))
    assert_described(found)
    assert found["k"].tolist() == [1, 3, 20]
    for row in found.itertuples():
        medians = {name: top_head_percentile(table, k=row.k).statistic for name, table in tables.items()}
        rope, ape = ([medians[name] for name in tables if groups[name] == group] for group in ("rope", "ape"))
        expected = model_permutation_test(rope, ape)
        assert (row.pvalue, row.floor) == (expected.pvalue, expected.floor)
        assert (row.gap, row.separated) == (expected.gap, expected.separated)
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
