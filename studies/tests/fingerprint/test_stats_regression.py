"""Nested regressions and classes of heads against statsmodels, rank correlations against scipy, triage by pairs."""

import sys

import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
import statsmodels.formula.api as smf
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.anova import anova_lm
from tlspectral_studies.fingerprint.printed_pvalues import class_pvalue, mann_whitney_pvalue
from tlspectral_studies.fingerprint.replication.sentences.power import holm
from tlspectral_studies.fingerprint.statistics import (
    class_test,
    mann_whitney,
    nested_r_squared,
    spearman_table,
    triage,
)
from tlspectral_studies.fingerprint.statistics.regression import _fit

pytestmark = pytest.mark.lowest


def columns_of(seed=0, n=40):
    rng = np.random.default_rng(seed)
    heads = pd.DataFrame(rng.standard_normal((n, 3)), columns=["dir_frac", "D_head", "henrici"])
    heads["delta"] = heads["dir_frac"] - 0.3 * heads["D_head"] + rng.standard_normal(n)
    return heads


@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_formula(seed):
    heads = columns_of(seed)
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
    heads = columns_of(1)
    found = nested_r_squared(heads, "delta", [], "dir_frac")
    expected = smf.ols("delta ~ dir_frac", heads).fit()
    assert found.r_squared_base == pytest.approx(0, abs=1e-12)
    assert found.pvalue == pytest.approx(expected.f_pvalue, rel=1e-9)
    heads.loc[[1, 2], "D_head"] = np.nan
    found = nested_r_squared(heads, "delta", "dir_frac", "D_head")
    assert (found.n, found.n_dropped) == (38, 2)
    assert found.pvalue == nested_r_squared(heads.dropna(), "delta", "dir_frac", "D_head").pvalue


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


def test_columns_that_repeat_each_other_count_once_and_have_no_coefficient():
    heads = columns_of(4).assign(twice=lambda h: 2 * h["D_head"], again=lambda h: h["dir_frac"] + 1)
    expected = nested_r_squared(heads, "delta", "dir_frac", "D_head")
    found = nested_r_squared(heads, "delta", ["dir_frac", "again"], ["D_head", "twice"])
    assert found.freedom == expected.freedom == (1, 37)
    assert found.statistic == pytest.approx(expected.statistic, rel=1e-8)
    assert np.isnan(list(found.coefficients.values())).all()
    kept = nested_r_squared(heads, "delta", ["dir_frac", "again"], "D_head")
    assert kept.coefficients["D_head"] == pytest.approx(expected.coefficients["D_head"], rel=1e-8)


def test_every_pair_is_in_the_table_with_scipys_numbers():
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.standard_normal((60, 4)), columns=["a", "b", "prev", "ind"]).assign(same=1.0)
    frame["prev"] += frame["a"]
    frame.loc[:1, "b"] = np.nan
    found = spearman_table(frame, ["a", "b"], ["prev", "ind"])
    pairs = list(zip(found["column"], found["against"], strict=True))
    assert pairs == [("a", "prev"), ("a", "ind"), ("b", "prev"), ("b", "ind")]
    for row in found.itertuples():
        pair = frame[[row.column, row.against]].dropna()
        expected = scipy.stats.spearmanr(pair[row.column], pair[row.against])
        assert row.statistic == pytest.approx(expected.statistic, abs=1e-14)
        assert row.pvalue == pytest.approx(expected.pvalue, rel=1e-12)
    assert found[["n", "n_dropped"]].to_numpy().tolist() == [[60, 0]] * 2 + [[58, 2]] * 2
    np.testing.assert_allclose(found["q"], scipy.stats.false_discovery_control(found["pvalue"]))
    assert found["significant"].tolist() == [True, False, False, False]
    assert found["reason"].isna().all()
    # A pair without a correlation is no test of the family.
    found = spearman_table(frame, ["a", "same"], "prev")
    assert found["reason"].tolist() == [None, "a column is constant"]
    assert np.isnan(found.loc[1, ["statistic", "pvalue", "q"]].astype(float)).all()
    assert (found.loc[1, "significant"], found.loc[0, "q"]) == (False, found.loc[0, "pvalue"])
    assert "too few" in spearman_table(frame[:4], "b", "prev").loc[0, "reason"]
    assert "q" in spearman_table(frame, [], ["prev"])


# --- triage ---
def heads_of(seed=0, layers=8, per_layer=8, effect=1.0, shared=0.0):
    rng = np.random.default_rng(seed)
    layer = np.repeat(np.arange(layers), per_layer)
    level = shared * rng.standard_normal(layers)[layer]
    positive = level + rng.standard_normal(len(layer)) > 1
    heads = pd.DataFrame({"layer": layer, "head": np.tile(np.arange(per_layer), layers)})
    heads["prev"] = np.where(positive, 0.8, 0.1)
    heads["rope_imag_frac"] = np.round(effect * positive + level + rng.standard_normal(len(layer)), 1)
    heads["D_head"], heads["dir_frac"] = rng.uniform(size=(2, len(layer)))
    return heads


def one(heads, **options):
    return triage(heads, scores=["rope_imag_frac"], **options).iloc[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_auc_is_the_share_of_pairs_in_the_right_order(seed):
    heads = heads_of(seed, shared=0.5)
    found = one(heads)
    positive = heads["prev"] > 0.5
    high, low = (heads["rope_imag_frac"][at].to_numpy() for at in (positive, ~positive))
    right = (high[:, None] > low).mean() + 0.5 * (high[:, None] == low).mean()
    assert found.auc == pytest.approx(right, abs=1e-12)
    assert found.direction == ("higher" if right > 0.5 else "lower")
    assert (found.n, found.n_positive, found.base_rate) == (64, len(high), len(high) / 64)
    assert 0 < found.auc_low < found.auc < found.auc_high < 1
    # A turned score turns the AUC and its interval; order of rows and monotone maps mean nothing.
    turned = one(heads.assign(rope_imag_frac=-heads["rope_imag_frac"]))
    expected = [1 - found.auc, 1 - found.auc_high, 1 - found.auc_low]
    np.testing.assert_allclose([turned.auc, turned.auc_low, turned.auc_high], expected, atol=1e-9)
    pd.testing.assert_frame_equal(triage(heads.sample(frac=1, random_state=0)), triage(heads))
    mapped = one(heads.assign(rope_imag_frac=np.exp(heads["rope_imag_frac"])))
    assert mapped.to_dict() == pytest.approx(found.to_dict(), nan_ok=True)


def test_precision_is_the_share_of_positives_among_the_highest():
    heads = heads_of(1).assign(rope_imag_frac=lambda h: np.arange(len(h)) * 1.0)
    found = one(heads, ks=(1, 7, 64))
    positive = (heads["prev"] > 0.5).to_numpy()
    assert found.precision_at_1 == positive[-1]
    assert found.precision_at_7 == positive[-7:].mean()
    assert found.precision_at_64 == found.base_rate == positive.mean()
    # Equal scores are taken by layer, then head.
    heads = heads_of(2).assign(rope_imag_frac=1.0, prev=0.0)
    heads.loc[[0, 1, 8], "prev"] = 1.0
    heads.loc[63, "rope_imag_frac"] = 0.5
    assert one(heads.iloc[::-1], ks=(2, 4, 9)).filter(like="precision").tolist() == [1.0, 0.5, 3 / 9]
    few = one(heads_of(9, layers=3, per_layer=4), ks=(10, 20))
    assert "12 heads are fewer than k=20" in few.reason
    assert np.isnan(few.precision_at_20)


def test_the_variance_is_the_sum_over_pairs_of_heads_of_a_layer():
    heads = heads_of(10, layers=10, shared=1.0)
    found = one(heads)
    rows = list(heads[["layer", "prev", "rope_imag_frac"]].itertuples(index=False))
    positives, negatives = ([row for row in rows if (row.prev > 0.5) == side] for side in (True, False))

    def excess(row):
        """How much more often the head is on the right side of heads of the other class than the AUC says."""
        others = negatives if row.prev > 0.5 else positives
        wins = [0.5 + 0.5 * np.sign(row.rope_imag_frac - other.rope_imag_frac) for other in others]
        return (np.mean(wins) if row.prev > 0.5 else 1 - np.mean(wins)) - found.auc

    def within_layers(group, other):
        layers = {row.layer for row in group} | {row.layer for row in other}
        pairs = sum(excess(a) * excess(b) for a in group for b in other if a.layer == b.layer)
        return len(layers) / (len(layers) - 1) * pairs / (len(group) * len(other))

    variance = within_layers(positives, positives) + within_layers(negatives, negatives)
    variance += 2 * within_layers(positives, negatives)
    fewer = min(len({row.layer for row in group}) for group in (positives, negatives))
    half = scipy.stats.t.ppf(0.975, fewer - 1) * np.sqrt(variance) / (found.auc * (1 - found.auc))
    expected = scipy.special.expit(scipy.special.logit(found.auc) + np.array([-half, half]))
    np.testing.assert_allclose([found.auc_low, found.auc_high], expected, rtol=1e-6)


def test_every_score_has_a_row_and_the_percentile_is_made_from_d_head_where_it_is_absent():
    heads = heads_of(5)
    heads.loc[3, "D_head"] = np.nan
    made = triage(heads, scores=["D_head_pct"])
    known = heads.assign(D_head_pct=heads["D_head"].rank() / heads["D_head"].notna().sum())
    pd.testing.assert_frame_equal(made, triage(known, scores=["D_head_pct"]))
    assert (made.loc[0, "n"], made.loc[0, "n_dropped"]) == (63, 1)
    # The table's own percentile is taken as it is.
    other = triage(known.assign(D_head_pct=known["dir_frac"]), scores=["D_head_pct", "dir_frac"])
    assert other.loc[0, "auc"] == other.loc[1, "auc"]
    found = triage(heads.drop(columns=["rope_imag_frac", "D_head"]))
    assert found["score"].tolist() == ["rope_imag_frac", "D_head_pct", "dir_frac"]
    assert found["reason"].tolist() == [f"the table has no column {name}" for name in found["score"][:2]] + [None]
    assert found.loc[0, "direction"] == "none"


def without_a_fit(**changes):
    return nested_r_squared(columns_of(3).assign(**changes), "delta", "dir_frac", "D_head")


def without_a_class(threshold=0.3, **changes):
    return class_test(classed_heads().assign(**changes), threshold=threshold)


def without_an_auc(**changes):
    return one(heads_of(7).assign(**changes))


NO_NUMBER = [
    (without_a_fit, {"delta": 0.1}, "delta is constant"),
    (without_a_fit, {"D_head": 0.1}, "D_head are linear functions of dir_frac"),
    (without_a_fit, {"D_head": lambda h: 3 - h["dir_frac"]}, "D_head are linear functions of dir_frac"),
    (without_a_fit, {"delta": lambda h: h["D_head"] + h["dir_frac"]}, "the columns explain delta without a remainder"),
    (without_a_fit, {"D_head": lambda h: h["D_head"].where(h.index < 3)}, "3 rows are too few for 2 columns"),
    (without_a_fit, {"D_head": np.nan}, "0 rows are too few"),
    (without_a_class, {"threshold": 2.0}, "no head has prev above 2.0"),
    (without_a_class, {"threshold": -1.0}, "every head has prev above -1.0"),
    (without_a_class, {"D_head": 0.1}, "D_head is constant"),
    (without_a_class, {"D_head": lambda h: 2 * h["dir_frac"] - 1}, "D_head is a linear function of the controls"),
    (without_a_class, {"D_head": np.nan}, "no head has prev"),
    (without_an_auc, {"prev": 0.0}, "no head has prev above 0.5"),
    (without_an_auc, {"prev": 1.0}, "every head has prev above 0.5"),
    (without_an_auc, {"rope_imag_frac": 0.3}, "rope_imag_frac is constant"),
    (without_an_auc, {"rope_imag_frac": np.nan}, "no head has both rope_imag_frac and prev"),
]


@pytest.mark.parametrize(("measure", "changes", "reason"), NO_NUMBER)
def test_what_cannot_be_compared_is_nan_with_a_reason(measure, changes, reason):
    found = measure(**changes)
    assert reason in found.reason
    names = ("auc", "auc_low", "auc_high") if measure is without_an_auc else ("statistic", "pvalue")
    assert np.isnan([getattr(found, name) for name in names]).all()
    assert getattr(found, "direction", "none") == "none"


def test_an_auc_without_an_interval_says_why():
    heads = heads_of(8)
    perfect = one(heads.assign(rope_imag_frac=heads["prev"]))
    assert perfect.auc == 1
    assert "separates" in perfect.reason
    lone = heads.assign(prev=0.0)
    lone.loc[20, "prev"] = 1.0
    found = one(lone)
    assert np.isfinite(found.auc)
    assert found.reason == "positives lie in 1 of 8 layers: too few for an interval"
    assert np.isnan([perfect.auc_low, found.auc_low]).all()


@pytest.mark.parametrize("call", [lambda: holm(np.ones(3)), lambda: _fit(np.ones(3), np.ones((3, 1)))])
def test_without_statsmodels_it_says_what_installs_it(monkeypatch, call):
    monkeypatch.setitem(sys.modules, "statsmodels", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"needs the package statsmodels: pip install \./studies"):
        call()
