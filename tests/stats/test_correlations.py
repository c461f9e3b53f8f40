"""Partial rank correlations, over all rows and within layers: invariants, and plain routes through other libraries."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.regression.linear_model import OLS

from tlspectral.stats import benjamini_hochberg, partial_spearman
from tlspectral.stats.correlations import student_pvalue

pytestmark = pytest.mark.lowest

invariant = settings(max_examples=20, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
methods = pytest.mark.parametrize("method", ["hybrid", "rank"])
# Two roundings of one sum differ by 1e-15; a wrong degree of freedom or a dropped control moves a number by 1e-3.
EXACT = {"rtol": 1e-11, "atol": 1e-13}


def correlated(seed, n=40):
    """x, y and controls that all depend on each other; y with the heavy tail of attention scores."""
    rng = np.random.default_rng(seed)
    c = rng.standard_normal((n, 2))
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
def test_rows_with_nan_are_dropped_and_counted_and_infinite_ones_ranked(method):
    x, y, controls = correlated(13)
    expected = partial_spearman(x[3:], y[3:], controls[3:], method=method)
    x[0], y[1], controls[2, 1] = np.nan, np.nan, np.nan
    found = partial_spearman(x, y, controls, method=method)
    assert found.n_dropped == 3
    assert found.n == expected.n == len(x) - 3
    assert found.statistic == expected.statistic
    nullable = pd.Series(x, dtype="Float64")
    assert partial_spearman(nullable, y, controls, method=method) == found
    x[5], finite = np.inf, np.where(np.arange(len(x)) == 5, 1e6, x)
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


# --- false discovery ---


pvalues = st.lists(st.floats(0, 1), min_size=1, max_size=30)


@given(pvalues, st.floats(0.01, 0.99))
@invariant
def test_rejections_are_those_of_the_step_up_procedure(p, level):
    p, n = np.array(p), len(p)
    ordered = np.sort(p)
    passed = np.flatnonzero(ordered * n / np.arange(1, n + 1) <= level)
    cut = ordered[passed[-1]] if len(passed) else -1
    np.testing.assert_array_equal(benjamini_hochberg(p).q <= level, p <= cut)


def test_a_missing_p_is_no_test():
    equal = benjamini_hochberg([1 / 252, 1 / 252, 1 / 252, 2 / 252])
    np.testing.assert_allclose(equal.q, [4 / 756, 4 / 756, 4 / 756, 2 / 252], rtol=1e-12)
    found = benjamini_hochberg([0.01, np.nan, 0.04])
    assert found.n == 2
    np.testing.assert_allclose(found.q, [0.02, np.nan, 0.04])
    assert np.isnan(benjamini_hochberg([np.nan]).q).all()


# --- within layers ---


def heads_of(seed):
    """Columns that go together within layers and, the other way round, between them."""
    rng = np.random.default_rng(seed)
    layer = np.repeat(np.arange(8), 6)
    depth = 3 * rng.standard_normal(8)[layer]
    control, x = rng.standard_normal((2, len(layer)))
    y = x + control + rng.standard_normal(len(layer))
    return pd.DataFrame({"layer": layer, "x": x + depth, "y": np.exp(0.3 * (y - depth)), "control": control})


def within(heads, method="hybrid"):
    return partial_spearman(heads["x"], heads["y"], heads["control"], method=method, layers=heads["layer"])


@methods
def test_it_is_the_definition_in_plain_steps(method):
    heads = heads_of(1).drop(index=[3, 20, 21])  # layers of unlike size
    variables = heads[["x", "y", "control"]].rank() if method == "rank" else heads
    design = np.column_stack([variables["control"], pd.get_dummies(heads["layer"]).astype(float)])
    left = pd.DataFrame({name: OLS(variables[name], design).fit().resid for name in ("x", "y")})
    if method == "hybrid":
        left = left.rank()
        left -= left.groupby(heads["layer"]).transform("mean")
    of_layers = (left["x"] * left["y"]).groupby(heads["layer"]).sum()
    found = within(heads, method)
    assert found.statistic == pytest.approx(np.corrcoef(left["x"], left["y"])[0, 1], abs=1e-12)
    assert found.pvalue == pytest.approx(scipy.stats.ttest_1samp(of_layers, 0).pvalue, rel=1e-9)
    assert (found.n, found.n_controls, found.n_layers, found.method) == (45, 1, 8, method)


@given(seed=seeds)
@invariant
def test_heads_that_copy_each_other_are_no_further_evidence(seed):
    heads = heads_of(seed)
    found, copied = within(heads), within(pd.concat([heads, heads, heads], ignore_index=True))
    assert copied.statistic == pytest.approx(found.statistic, abs=1e-12)
    assert copied.pvalue == pytest.approx(found.pvalue, rel=1e-9)
    # Neither order nor names of layers matter.
    named = heads.assign(layer="blocks." + heads["layer"].astype(str)).sample(frac=1, random_state=seed % 1000)
    assert within(named).pvalue == pytest.approx(found.pvalue, rel=1e-9)
    assert within(named).statistic == pytest.approx(found.statistic, abs=1e-12)


def test_rows_without_value_or_layer_are_counted():
    heads = heads_of(3).astype({"layer": float})
    heads.loc[0, "x"], heads.loc[9, "layer"] = np.nan, np.nan
    found, expected = within(heads), within(heads.drop(index=[0, 9]))
    assert (found.n, found.n_dropped) == (46, 2)
    assert (found.statistic, found.pvalue) == (expected.statistic, expected.pvalue)


def test_a_layer_of_one_head_says_nothing():
    heads = heads_of(4)
    lone = pd.concat([heads, heads.tail(1).assign(layer=99, x=50.0, y=50.0)], ignore_index=True)
    assert within(lone).n_layers == 8
    assert "2 layers with two heads are fewer than 3" in within(heads[heads["layer"] < 2]).reason
    alone = within(heads.assign(layer=np.arange(len(heads))))
    assert "0 layers" in alone.reason
    assert np.isnan([alone.statistic, alone.pvalue]).all()


@methods
def test_what_does_not_vary_within_layers_has_no_correlation(method):
    heads = heads_of(5)
    constant = within(heads.assign(x=0.1 * heads["layer"]), method)
    assert constant.reason == "within layers, x is a linear function of the controls"
    assert np.isnan([constant.statistic, constant.pvalue]).all()
    depth = within(heads.assign(control=heads["layer"]), method)
    assert depth.n_controls == 0
    apart = heads.assign(x=heads["x"] * (heads["layer"] == 0), y=heads["y"] * (heads["layer"] == 1))
    found = partial_spearman(apart["x"], apart["y"], np.empty((len(apart), 0)), layers=apart["layer"])
    assert (found.statistic, found.pvalue) == (0, 1)
