"""Partial correlations within layers: the definition in plain steps, what may not move them, what has none."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.regression.linear_model import OLS

from tlspectral.stats import partial_spearman

invariant = settings(max_examples=20, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
methods = pytest.mark.parametrize("method", ["hybrid", "rank"])


def heads_of(seed=0, layers=8, per_layer=6):
    """Columns that go together within layers and, the other way round, between them."""
    rng = np.random.default_rng(seed)
    layer = np.repeat(np.arange(layers), per_layer)
    depth = 3 * rng.standard_normal(layers)[layer]
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
