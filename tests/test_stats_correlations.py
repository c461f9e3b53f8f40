"""Partial rank correlations: exact invariants, plain routes through statsmodels and scipy, what has no number."""

from inspect import unwrap

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.regression.linear_model import OLS

from tlspectral.stats import benjamini_hochberg, partial_spearman
from tlspectral.stats.correlations import student_pvalue

invariant = settings(max_examples=40, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
methods = pytest.mark.parametrize("method", ["hybrid", "rank"])
# Two roundings of one sum differ by 1e-15; a wrong degree of freedom or a dropped control moves a number by 1e-3.
EXACT = {"rtol": 1e-11, "atol": 1e-13}


def correlated(seed, n=40, controls=2):
    """x, y and controls that all depend on each other; y with the heavy tail of attention scores."""
    rng = np.random.default_rng(seed)
    c = rng.standard_normal((n, controls))
    x = c.sum(1) + rng.standard_normal(n)
    y = np.exp(c[:, 0] + 0.5 * x + rng.standard_normal(n))
    return x, y, c


def plain(x, y, controls, method):
    """The recipes word by word, through statsmodels and scipy."""
    if method == "rank":
        x, y = scipy.stats.rankdata(x), scipy.stats.rankdata(y)
        controls = np.column_stack([scipy.stats.rankdata(c) for c in controls.T])
    design = np.column_stack([np.ones(len(x)), controls])
    left = OLS(x, design).fit().resid, OLS(y, design).fit().resid
    return scipy.stats.spearmanr(*left) if method == "hybrid" else scipy.stats.pearsonr(*left)


# --- the statistic ---


@methods
@given(seed=seeds)
@invariant
def test_it_is_the_plain_recipe(method, seed):
    x, y, controls = correlated(seed)
    found, expected = partial_spearman(x, y, controls, method=method), plain(x, y, controls, method)
    np.testing.assert_allclose(found.statistic, expected.statistic, **EXACT)
    np.testing.assert_allclose(student_pvalue(found.statistic, found.n - 2), expected.pvalue, **EXACT)


@methods
@given(seed=seeds)
@invariant
def test_it_is_symmetric_odd_and_bounded(method, seed):
    x, y, controls = correlated(seed)
    found = partial_spearman(x, y, controls, method=method).statistic
    assert partial_spearman(y, x, controls, method=method).statistic == pytest.approx(found, abs=1e-12)
    assert partial_spearman(-x, y, controls, method=method).statistic == pytest.approx(-found, abs=1e-12)
    assert -1 <= found <= 1


@methods
@given(seed=seeds)
@invariant
def test_a_variable_correlates_fully_with_itself(method, seed):
    x, _, controls = correlated(seed)
    assert partial_spearman(x, x, controls, method=method).statistic == pytest.approx(1, abs=1e-12)


@given(seed=seeds, scale=st.floats(0.01, 100), shift=st.floats(-10, 10))
@invariant
def test_hybrid_does_not_change_when_a_multiple_of_a_control_is_added(seed, scale, shift):
    x, y, controls = correlated(seed)
    found = partial_spearman(x, y, controls).statistic
    moved = partial_spearman(scale * x + shift * controls[:, 0], y, controls).statistic
    assert moved == pytest.approx(found, abs=1e-12)


@given(seed=seeds)
@invariant
def test_rank_does_not_change_under_monotone_maps(seed):
    x, y, controls = correlated(seed)
    found = partial_spearman(x, y, controls, method="rank").statistic
    mapped = partial_spearman(np.exp(x), y**3, np.sinh(controls), method="rank").statistic
    assert mapped == found
    assert partial_spearman(x, np.log(y), controls).statistic != partial_spearman(x, y, controls).statistic


@given(seed=seeds)
@invariant
def test_hybrid_without_linear_dependence_is_plain_spearman_ties_kept(seed):
    rng = np.random.default_rng(seed)
    # Every pair of x and y comes with the control at +1 and at -1: no slope. Few values, so many ties.
    half = rng.integers(0, 4, size=(25, 2)).astype(float)
    x, y = np.vstack([half, half]).T
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return
    control = np.repeat([1.0, -1.0], 25)
    found = partial_spearman(x, y, control)
    assert found.statistic == pytest.approx(scipy.stats.spearmanr(x, y).statistic, abs=1e-14)


@methods
def test_the_order_of_rows_means_nothing(method):
    x, y, controls = correlated(3)
    order = np.random.default_rng(0).permutation(len(x))
    found = partial_spearman(x, y, controls, method=method).statistic
    assert partial_spearman(x[order], y[order], controls[order], method=method).statistic == pytest.approx(found, 1e-12)


def test_a_confounder_is_taken_out():
    rng = np.random.default_rng(0)
    common = rng.standard_normal(2000)
    x, y = common + rng.standard_normal(2000), common + rng.standard_normal(2000)
    # Standard error 1 / sqrt(2000) = .022; the correlation before is .48.
    assert scipy.stats.spearmanr(x, y).statistic > 0.4
    for method in ("hybrid", "rank"):
        assert abs(partial_spearman(x, y, common, method=method).statistic) < 0.08


# --- degrees of freedom ---


@methods
def test_controls_cost_degrees_of_freedom(method):
    x, y, controls = correlated(5, n=12)
    found = partial_spearman(x, y, controls, method=method)
    r = found.statistic
    freedom = 12 - 2 - 2
    expected = 2 * scipy.stats.t.sf(abs(r) * np.sqrt(freedom / (1 - r * r)), freedom)
    assert found.pvalue == pytest.approx(expected, rel=1e-12)
    assert found.n == 12
    assert found.n_controls == 2


@methods
def test_repeated_and_constant_controls_are_not_counted(method):
    x, y, controls = correlated(7)
    padded = np.column_stack([controls, 3 * controls[:, 0] + 1, np.full(len(x), 0.1), controls[:, 1]])
    found, expected = (partial_spearman(x, y, c, method=method) for c in (padded, controls))
    assert found.n_controls == 2
    assert found.statistic == pytest.approx(expected.statistic, abs=1e-12)
    assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-10)


@methods
def test_without_controls_it_is_scipy(method):
    x, y, _ = correlated(9)
    expected = scipy.stats.spearmanr(x, y)
    for nothing in (np.empty((len(x), 0)), np.full(len(x), 2.5)):
        found = partial_spearman(x, y, nothing, method=method)
        assert found.statistic == pytest.approx(expected.statistic, abs=1e-14)
        assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-10)


# --- input ---


@methods
def test_series_arrays_frames_and_lists_say_the_same(method):
    x, y, controls = correlated(11)
    frame = pd.DataFrame(controls, columns=["a", "b"])
    expected = partial_spearman(x, y, controls, method=method)
    assert partial_spearman(pd.Series(x), list(y), frame, method=method) == expected
    alone = partial_spearman(x, y, controls[:, 0], method=method)
    assert partial_spearman(x, y, pd.Series(controls[:, 0]), method=method) == alone
    assert partial_spearman(x, y, controls[:, :1], method=method) == alone


@methods
def test_rows_with_nan_are_dropped_and_counted(method):
    x, y, controls = correlated(13)
    expected = partial_spearman(x[3:], y[3:], controls[3:], method=method)
    x[0], y[1], controls[2, 1] = np.nan, np.nan, np.nan
    found = partial_spearman(x, y, controls, method=method)
    assert found.n_dropped == 3
    assert found.n == expected.n == len(x) - 3
    assert found.statistic == expected.statistic
    nullable = pd.Series(x, dtype="Float64")
    assert partial_spearman(nullable, y, controls, method=method) == found


def test_infinite_values_are_ranked_but_not_fitted():
    x, y, controls = correlated(15)
    x[0] = np.inf
    with pytest.raises(ValueError, match="1 rows hold an infinite value"):
        partial_spearman(x, y, controls)
    finite = np.where(np.isinf(x), 1e6, x)
    assert partial_spearman(x, y, controls, method="rank") == partial_spearman(finite, y, controls, method="rank")


@methods
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x, y, c: (np.full_like(x, 0.1), y, c), "x is constant"),
        (lambda x, y, c: (x, np.full_like(y, 0.1), c), "y is constant"),
        (lambda x, y, c: (c[:, 1], y, c), "x is a linear function of the controls"),
        (lambda x, y, c: (x, c[:, 0], c), "y is a linear function of the controls"),
        (lambda x, y, c: (x[20:24], y[20:24], c[20:24]), "4 rows are too few for 2 controls"),
        (lambda x, y, c: (x[:2], y[:2], c[:2]), "2 rows are too few"),
        (lambda x, y, c: (x * np.nan, y, c), "0 rows are too few"),
    ],
)
def test_what_has_no_correlation_is_nan_with_a_reason(method, change, reason):
    found = partial_spearman(*change(*correlated(17)), method=method)
    assert reason in found.reason
    assert np.isnan([found.statistic, found.pvalue]).all()


def test_what_cannot_be_read_is_refused():
    x, y, controls = correlated(19)
    with pytest.raises(ValueError, match=r"as many rows each, found \[40, 39, 40\]"):
        partial_spearman(x, y[1:], controls)
    with pytest.raises(ValueError, match="method must be"):
        unwrap(partial_spearman)(x, y, controls, method="pearson")  # past the check of annotations
    with pytest.raises(ValueError, match="x must be one-dimensional"):
        partial_spearman(controls, y, controls)
    with pytest.raises(ValueError, match="controls must have one or two"):
        partial_spearman(x, y, controls[None])
    with pytest.raises(ValueError, match="y must hold numbers"):
        partial_spearman(x, ["a"] * len(x), controls)


def test_series_in_different_orders_are_not_paired_by_position():
    x, y, controls = correlated(21)
    turned = pd.Series(y)[::-1]
    with pytest.raises(ValueError, match="x and y hold the same index in different orders"):
        partial_spearman(pd.Series(x), turned, controls)
    assert partial_spearman(pd.Series(x), turned.to_numpy(), controls).n == len(x)


# --- false discovery ---


pvalues = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@given(pvalues)
@invariant
def test_q_is_monotone_in_p_and_never_below_it(p):
    p = np.array(p)
    q = benjamini_hochberg(p).q
    order = np.argsort(p)
    assert (np.diff(q[order]) >= 0).all()
    assert (q >= p * (1 - 1e-12)).all()
    assert (q <= 1).all()


@given(pvalues, st.floats(0.01, 0.99))
@invariant
def test_rejections_are_those_of_the_step_up_procedure(p, level):
    p, n = np.array(p), len(p)
    ordered = np.sort(p)
    passed = np.flatnonzero(ordered * n / np.arange(1, n + 1) <= level)
    cut = ordered[passed[-1]] if len(passed) else -1
    np.testing.assert_array_equal(benjamini_hochberg(p).q <= level, p <= cut)


def test_equal_p_have_one_q():
    found = benjamini_hochberg([1 / 252, 1 / 252, 1 / 252, 2 / 252])
    np.testing.assert_allclose(found.q, [4 / 756, 4 / 756, 4 / 756, 2 / 252], rtol=1e-12)


def test_a_missing_p_is_no_test():
    found = benjamini_hochberg([0.01, np.nan, 0.04])
    assert found.n == 2
    np.testing.assert_allclose(found.q, [0.02, np.nan, 0.04])
    assert np.isnan(benjamini_hochberg([np.nan]).q).all()
    with pytest.raises(ValueError, match=r"between 0 and 1, found 1\.5"):
        benjamini_hochberg([0.1, 1.5])
