"""Nested regressions against statsmodels formulas, and rank correlations pair by pair against scipy."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.formula.api as smf
from described import assert_described
from statsmodels.stats.anova import anova_lm

from tlspectral.studies.fingerprint.statistics import nested_r_squared, spearman_table


def heads_of(seed=0, n=40):
    rng = np.random.default_rng(seed)
    heads = pd.DataFrame(rng.standard_normal((n, 3)), columns=["dir_frac", "D_head", "henrici"])
    heads["delta"] = heads["dir_frac"] - 0.3 * heads["D_head"] + rng.standard_normal(n)
    return heads


@pytest.mark.parametrize("seed", range(3))
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
    # Units of a column change its coefficient alone.
    for scale in (1e-14, 1e9):
        moved = nested_r_squared(heads.assign(D_head=scale * heads["D_head"]), "delta", "dir_frac", "D_head")
        plain = nested_r_squared(heads, "delta", "dir_frac", "D_head")
        assert moved.statistic == pytest.approx(plain.statistic, rel=1e-8)
        assert moved.coefficients["D_head"] * scale == pytest.approx(plain.coefficients["D_head"], rel=1e-8)


def test_without_a_base_it_is_one_regression_and_rows_with_nan_are_counted():
    heads = heads_of(1)
    found = nested_r_squared(heads, "delta", [], "dir_frac")
    expected = smf.ols("delta ~ dir_frac", heads).fit()
    assert found.r_squared_base == pytest.approx(0, abs=1e-12)
    assert found.pvalue == pytest.approx(expected.f_pvalue, rel=1e-9)
    heads.loc[[1, 2], "D_head"] = np.nan
    found = nested_r_squared(heads, "delta", "dir_frac", "D_head")
    assert (found.n, found.n_dropped) == (38, 2)
    assert found.pvalue == nested_r_squared(heads.dropna(), "delta", "dir_frac", "D_head").pvalue


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


# --- pair by pair ---


def test_every_pair_is_in_the_table_with_scipys_numbers():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((60, 4)), columns=["a", "b", "prev", "ind"]).assign(same=1.0)
    frame["prev"] += frame["a"]
    frame.loc[:1, "b"] = np.nan
    found = spearman_table(frame, ["a", "b"], ["prev", "ind"])
    assert_described(found)
    pairs = list(zip(found["column"], found["against"], strict=True))
    assert pairs == [("a", "prev"), ("a", "ind"), ("b", "prev"), ("b", "ind")]
    for row in found.itertuples():
        pair = frame[[row.column, row.against]].dropna()
        expected = scipy.stats.spearmanr(pair[row.column], pair[row.against])
        assert row.statistic == pytest.approx(expected.statistic, abs=1e-14)
        assert row.pvalue == pytest.approx(expected.pvalue, rel=1e-12)
    assert found["n"].tolist() == [60, 60, 58, 58]
    assert found["n_dropped"].tolist() == [0, 0, 2, 2]
    np.testing.assert_allclose(found["q"], scipy.stats.false_discovery_control(found["pvalue"]))
    assert found["significant"].tolist() == [True, False, False, False]
    assert found["reason"].tolist() == [None] * 4
    # A pair without a correlation is no test of the family.
    found = spearman_table(frame, ["a", "same"], "prev")
    assert found["reason"].tolist() == [None, "a column is constant"]
    assert np.isnan(found.loc[1, ["statistic", "pvalue", "q"]].astype(float)).all()
    assert not found.loc[1, "significant"]
    assert found.loc[0, "q"] == found.loc[0, "pvalue"]
    assert "too few" in spearman_table(frame[:4], "b", "prev").loc[0, "reason"]
    assert "q" in spearman_table(frame, [], ["prev"])
