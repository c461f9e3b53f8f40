"""p- and q-values as the paper printed them: against scipy, enumeration and its Table 4."""

import itertools

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.stats import benjamini_hochberg, model_permutation_test, partial_spearman
from tlspectral.studies.fingerprint.printed_pvalues import (
    class_pvalue,
    gap_pvalue,
    mann_whitney_pvalue,
    partial_pvalue,
    q_without_minimum,
)
from tlspectral.studies.fingerprint.statistics import class_test

invariant = settings(max_examples=60, derandomize=True)
few = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=5).map(np.array)
pvalues = st.lists(st.floats(0, 1), min_size=1, max_size=12).map(np.array)


def test_controls_are_not_counted():
    x, y, control = np.random.default_rng(0).standard_normal((3, 12))
    found = partial_spearman(x, y, control)
    r = found.statistic
    expected = 2 * scipy.stats.t.sf(abs(r) * np.sqrt(10 / (1 - r * r)), 10)
    assert partial_pvalue(found) == pytest.approx(expected, rel=1e-12)
    assert partial_pvalue(found) < found.pvalue


def test_p_is_exact_without_regard_to_ties_where_a_group_is_small():
    # P2 of the paper's Table 4; with ties counted it is 3 / 252.
    slow, quick = np.array([1300.0, 1400, 1300, 1000, 1400]), np.array([1000.0, 900, 1000, 900, 900])
    assert mann_whitney_pvalue(slow, quick, "greater") == pytest.approx(2 / 252, rel=1e-12)
    x, y = np.random.default_rng(0).standard_normal((2, 14))
    expected = scipy.stats.mannwhitneyu(x[:9], y, method="asymptotic").pvalue
    assert mann_whitney_pvalue(x[:9], y) == expected
    assert mann_whitney_pvalue(np.ones(3), np.ones(4)) == 1


def test_classes_are_compared_by_their_residuals():
    rng = np.random.default_rng(0)
    heads = pd.DataFrame(rng.uniform(size=(120, 3)), columns=["prev", "D_head", "dir_frac"])
    heads.loc[3, "D_head"] = np.nan
    # 36 heads against 83: class_test counts all labelings, which the normal law meets within 1e-3.
    assert class_pvalue(heads, 0.7) == pytest.approx(class_test(heads, threshold=0.7).pvalue, abs=2e-3)
    assert class_pvalue(heads.assign(D_head=heads["dir_frac"] + (heads["prev"] > 0.7)), 0.7) < 1e-12


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


@given(p=pvalues)
@invariant
def test_q_is_larger_only_where_the_minimum_was_left_out(p):
    assert (benjamini_hochberg(p).q <= q_without_minimum(p) * (1 + 1e-12)).all()


def test_table_4_of_the_paper():
    # P1, P3, P4, P2, as printed: P1 and P2 come out against the order of their p.
    found = q_without_minimum(np.array([1, 1, 1, 2]) / 252)
    np.testing.assert_allclose(found, [0.016, 0.008, 0.005, 0.008], atol=5e-4)
