"""Nested regressions, against statsmodels formulas."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.stats.anova import anova_lm

from tlspectral.studies.fingerprint.statistics import nested_r_squared

invariant = settings(max_examples=40, derandomize=True)
seeds = st.integers(0, 2**32 - 1)


def heads_of(seed=0, n=40):
    rng = np.random.default_rng(seed)
    heads = pd.DataFrame(rng.standard_normal((n, 3)), columns=["dir_frac", "D_head", "henrici"])
    heads["delta"] = heads["dir_frac"] - 0.3 * heads["D_head"] + rng.standard_normal(n)
    return heads


@given(seed=seeds)
@invariant
def test_it_is_the_formula(seed):
    heads = heads_of(seed)
    found = nested_r_squared(heads, "delta", ["dir_frac"], ["D_head", "henrici"])
    smaller, larger = (smf.ols(f"delta ~ dir_frac{more}", heads).fit() for more in ("", " + D_head + henrici"))
    assert found.r_squared_base == pytest.approx(smaller.rsquared, rel=1e-9)
    assert found.r_squared == pytest.approx(larger.rsquared, rel=1e-9)
    compared = anova_lm(smaller, larger).iloc[1]
    assert found.statistic == pytest.approx(compared["F"], rel=1e-8)
    assert found.pvalue == pytest.approx(compared["Pr(>F)"], rel=1e-8)
    assert found.freedom == (2, 36)
    for name in ("D_head", "henrici"):
        assert found.coefficients[name] == pytest.approx(larger.params[name], rel=1e-8)


@given(seed=seeds, scale=st.sampled_from([1e-14, 0.3, 1e9]))
@invariant
def test_units_of_a_column_change_its_coefficient_alone(seed, scale):
    heads = heads_of(seed)
    found = nested_r_squared(heads, "delta", "dir_frac", "D_head")
    moved = nested_r_squared(heads.assign(D_head=scale * heads["D_head"]), "delta", "dir_frac", "D_head")
    assert moved.statistic == pytest.approx(found.statistic, rel=1e-8)
    assert moved.r_squared == pytest.approx(found.r_squared, rel=1e-10)
    assert moved.coefficients["D_head"] * scale == pytest.approx(found.coefficients["D_head"], rel=1e-8)


def test_the_sign_of_what_was_added_is_told():
    found = nested_r_squared(heads_of(0, n=400), "delta", "dir_frac", "D_head")
    # -0.3 with a standard error of .05.
    assert found.coefficients["D_head"] == pytest.approx(-0.3, abs=0.15)
    assert found.r_squared > found.r_squared_base
    assert found.pvalue < 1e-3


def test_without_a_base_it_is_one_regression():
    heads = heads_of(1)
    found = nested_r_squared(heads, "delta", [], "dir_frac")
    expected = smf.ols("delta ~ dir_frac", heads).fit()
    assert found.r_squared_base == pytest.approx(0, abs=1e-12)
    assert found.pvalue == pytest.approx(expected.f_pvalue, rel=1e-9)


def test_regression_rows_with_nan_are_counted_and_infinite_ones_refused():
    heads = heads_of(2)
    heads.loc[[1, 2], "D_head"] = np.nan
    found = nested_r_squared(heads, "delta", "dir_frac", "D_head")
    assert (found.n, found.n_dropped) == (38, 2)
    assert found.pvalue == nested_r_squared(heads.dropna(), "delta", "dir_frac", "D_head").pvalue
    heads.loc[1, "D_head"] = np.inf
    with pytest.raises(ValueError, match="infinite"):
        nested_r_squared(heads, "delta", "dir_frac", "D_head")
    with pytest.raises(ValueError, match=r"no column \['dCE_sym'\]"):
        nested_r_squared(heads, "dCE_sym", "dir_frac", "D_head")
    with pytest.raises(ValueError, match="at least one column"):
        nested_r_squared(heads, "delta", "dir_frac", [])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"delta": 0.1}, "delta is constant"),
        ({"D_head": 0.1}, "D_head are linear functions of dir_frac"),
        ({"D_head": lambda h: 3 - h["dir_frac"]}, "D_head are linear functions of dir_frac"),
        ({"delta": lambda h: h["D_head"] + h["dir_frac"]}, "the columns explain delta without a remainder"),
        ({"D_head": lambda h: h["D_head"].where(h.index < 3)}, "3 rows are too few for 2 columns"),
        ({"D_head": lambda h: h["D_head"].where(h.index < 2)}, "2 rows are too few"),
        ({"D_head": np.nan}, "0 rows are too few"),
    ],
)
def test_what_cannot_be_compared_is_nan_with_a_reason(change, reason):
    found = nested_r_squared(heads_of(3).assign(**change), "delta", "dir_frac", "D_head")
    assert found.reason == reason
    assert np.isnan([found.statistic, found.pvalue]).all()


def test_columns_that_repeat_each_other_count_once_and_have_no_coefficient():
    heads = heads_of(4).assign(twice=lambda h: 2 * h["D_head"], again=lambda h: h["dir_frac"] + 1)
    expected = nested_r_squared(heads, "delta", "dir_frac", "D_head")
    found = nested_r_squared(heads, "delta", ["dir_frac", "again"], ["D_head", "twice"])
    assert found.freedom == expected.freedom == (1, 37)
    assert found.statistic == pytest.approx(expected.statistic, rel=1e-8)
    assert np.isnan(list(found.coefficients.values())).all()
    kept = nested_r_squared(heads, "delta", ["dir_frac", "again"], "D_head")
    assert kept.coefficients["D_head"] == pytest.approx(expected.coefficients["D_head"], rel=1e-8)
