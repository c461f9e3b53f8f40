"""Intervals over layers, attenuation, intraclass correlation: plain loops, exact cases, coverage."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import statsmodels.formula.api as smf
from hypothesis import given, settings
from hypothesis import strategies as st
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.anova import anova_lm

from tlspectral.stats import attenuation, intraclass_correlation, layer_bootstrap, partial_spearman

invariant = settings(max_examples=20, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
methods = pytest.mark.parametrize("method", ["hybrid", "rank"])


def heads_of(seed=0, layers=8, per_layer=6, shared=1.0):
    """Head tables whose columns depend on each other and on the layer."""
    rng = np.random.default_rng(seed)
    layer = np.repeat(np.arange(layers), per_layer)
    rows, level = len(layer), shared * rng.standard_normal((layers, 3))
    dir_frac = level[layer, 0] + rng.standard_normal(rows)
    rif = level[layer, 1] + rng.standard_normal(rows)
    d_head = dir_frac + rif + level[layer, 2] + rng.standard_normal(rows)
    return pd.DataFrame(
        {
            "layer": layer,
            "head": np.tile(np.arange(per_layer), layers),
            "kv_head": np.tile(np.arange(per_layer) // 2, layers),
            "dir_frac": dir_frac,
            "rope_imag_frac": rif,
            "freq_centroid": rng.standard_normal(rows),
            "D_head": d_head,
            "prev": np.exp(d_head + rng.standard_normal(rows)),
        }
    )


def resamples(heads, cluster, draws, seed):
    """Tables of resampled clusters, by the definition."""
    members = [group for _, group in heads.groupby(cluster)]
    drawn = np.random.default_rng(seed).integers(len(members), size=(draws, len(members)))
    return [pd.concat([members[place] for place in chosen], ignore_index=True) for chosen in drawn]


# --- the interval ---


@methods
@pytest.mark.parametrize("cluster", ["layer", ("layer", "kv_head")])
def test_it_is_the_loop_over_resampled_tables(method, cluster):
    heads = heads_of(1)
    found = layer_bootstrap(heads, cluster=cluster, method=method, draws=60, level=0.9, seed=4)
    draws = np.array(
        [
            partial_spearman(table["D_head"], table["prev"], table["dir_frac"], method=method).statistic
            for table in resamples(heads, list(np.atleast_1d(cluster)), 60, 4)
        ]
    )
    np.testing.assert_allclose(found.interval, np.quantile(draws, [0.05, 0.95]), rtol=1e-12)
    assert found.stderr == pytest.approx(draws.std(ddof=1), rel=1e-12)
    assert (
        found.statistic == partial_spearman(heads["D_head"], heads["prev"], heads["dir_frac"], method=method).statistic
    )
    clusters = {"layer": 8, ("layer", "kv_head"): 24}[cluster]
    labels = heads.groupby(list(np.atleast_1d(cluster))).ngroup()
    rest = [layer_bootstrap(heads[labels != label], method=method, draws=2).statistic for label in range(clusters)]
    law = scipy.stats.t(clusters - 1, found.statistic, np.std(rest) * np.sqrt(clusters - 1))
    assert found.interval_jackknife == pytest.approx((max(-1, law.ppf(0.05)), min(1, law.ppf(0.95))), rel=1e-9)
    assert found.pvalue == pytest.approx(2 * min(law.cdf(0), law.sf(0)), rel=1e-9)
    assert (found.n, found.draws, found.n_degenerate, found.seed) == (48, 60, 0, 4)
    assert found.n_clusters == clusters


def test_controls_are_taken_out_inside_each_resample():
    heads = heads_of(2, layers=5)
    design = np.column_stack([np.ones(len(heads)), heads["dir_frac"]])
    fixed = heads.assign(**{name: OLS(heads[name], design).fit().resid for name in ("D_head", "prev")})
    refitted = layer_bootstrap(heads, draws=400)
    once = layer_bootstrap(fixed, controls=(), draws=400)
    assert once.statistic == pytest.approx(refitted.statistic, abs=1e-12)
    # The ends move by .02 here; rounding moves them by 1e-15.
    assert np.abs(np.subtract(once.interval, refitted.interval)).max() > 5e-3


@given(seed=seeds)
@invariant
def test_a_seed_gives_one_result_whatever_the_order_of_rows(seed):
    heads = heads_of(3)
    found = layer_bootstrap(heads, draws=30, seed=seed)
    assert found == layer_bootstrap(heads, draws=30, seed=seed)
    shuffled = layer_bootstrap(heads.sample(frac=1, random_state=0), draws=30, seed=seed)
    np.testing.assert_allclose(shuffled.interval, found.interval, atol=1e-12)
    assert layer_bootstrap(heads, draws=30, seed=seed + 1).interval != found.interval


@given(seed=seeds)
@invariant
def test_exchanging_the_variables_or_their_sign_moves_the_interval_along(seed):
    heads = heads_of(seed)
    found = layer_bootstrap(heads, draws=30)
    other = layer_bootstrap(heads, "prev", "D_head", draws=30)
    np.testing.assert_allclose(other.interval, found.interval, atol=1e-12)
    negative = layer_bootstrap(heads.assign(D_head=-heads["D_head"]), draws=30)
    np.testing.assert_allclose(np.negative(negative.interval[::-1]), found.interval, atol=1e-12)
    assert [negative.pvalue, other.pvalue] == pytest.approx([found.pvalue] * 2, rel=1e-9)


def test_clusters_of_heads_that_copy_each_other_widen_the_interval():
    heads = heads_of(4, layers=40, per_layer=1)
    copied = pd.concat([heads.assign(head=head) for head in range(6)], ignore_index=True)
    alone, clustered = (layer_bootstrap(table, draws=300) for table in (heads, copied))
    np.testing.assert_allclose(clustered.statistic, alone.statistic, atol=1e-12)
    np.testing.assert_allclose(clustered.interval, alone.interval, atol=1e-12)
    unclustered = layer_bootstrap(copied, cluster=("layer", "head"), draws=300)
    # Six copies counted as six heads: too narrow by sqrt(6).
    assert np.ptp(unclustered.interval) < 0.6 * np.ptp(clustered.interval)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """Independent variables in 24 layers: 0 should lie in 95 % of intervals."""
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(60):
        heads = pd.DataFrame(rng.standard_normal((96, 3)), columns=["D_head", "prev", "dir_frac"])
        heads["layer"] = np.arange(96) // 4
        found = layer_bootstrap(heads, draws=100)
        covered += found.interval[0] <= 0 <= found.interval[1]
    # Binomial sd 1.7 around 57; an interval of half the width covers 40.
    assert covered >= 51


def test_a_small_p_goes_with_an_interval_away_from_zero():
    strong = layer_bootstrap(heads_of(5), draws=200)
    assert strong.interval_jackknife[0] > 0
    assert strong.pvalue < 0.01
    noise = heads_of(5).assign(D_head=np.random.default_rng(0).standard_normal(48))
    weak = layer_bootstrap(noise, draws=200)
    assert weak.interval_jackknife[0] < 0 < weak.interval_jackknife[1]
    assert 0.05 < weak.pvalue <= 1
    # The two say the same at any level: p is the level at which the interval touches 0.
    touching = layer_bootstrap(noise, draws=200, level=1 - weak.pvalue).interval_jackknife
    assert min(np.abs(touching)) == pytest.approx(0, abs=1e-9)


def test_rows_without_a_value_or_a_layer_are_dropped_and_counted():
    heads = heads_of(6).astype({"layer": float})
    heads.loc[0, "D_head"], heads.loc[7, "layer"] = np.nan, np.nan
    found = layer_bootstrap(heads, draws=20)
    expected = layer_bootstrap(heads.drop(index=[0, 7]), draws=20)
    assert found.n_dropped == 2
    assert (found.n, found.interval) == (expected.n, expected.interval)


def test_degenerate_resamples_are_counted_and_left_out():
    heads = heads_of(7, layers=4, per_layer=3)
    heads.loc[heads["layer"] > 1, "prev"] = 0.0  # a resample of the last two layers alone is constant
    found = layer_bootstrap(heads, draws=500)
    # (1/2)^4 of 500 draws: 31 with sd 5.
    assert 10 <= found.n_degenerate <= 55
    assert found.reason is None
    lone = heads_of(7, layers=6, per_layer=3)
    lone = lone.assign(D_head=lone["head"] * (lone["layer"] == 0), prev=lone["head"] * (lone["layer"] == 1))
    few = layer_bootstrap(lone, controls=(), draws=1000)
    # Both layers that vary are in 1 - 2 (5/6)^6 + (4/6)^6 = 42 % of resamples; sd 16.
    assert 520 <= few.n_degenerate <= 640
    assert "resamples are degenerate" in few.reason
    assert np.isnan([*few.interval, *few.interval_jackknife, few.pvalue, few.stderr]).all()


def test_a_layer_that_alone_carries_the_correlation_leaves_no_p():
    heads = heads_of(8)
    heads["prev"] = heads["prev"].where(heads["layer"] == 3, 0.0)
    found = layer_bootstrap(heads, draws=400)
    # Without layer 3, which is in 1 - (7/8)^8 = 66 % of resamples, prev is constant.
    assert np.isfinite(found.interval).all()
    assert np.isnan([*found.interval_jackknife, found.pvalue]).all()
    assert "without one of the clusters" in found.reason


def test_what_has_no_interval_is_nan_with_a_reason():
    two = layer_bootstrap(heads_of(8, layers=2), draws=20)
    assert two.reason == "2 clusters are fewer than 3"
    assert np.isfinite(two.statistic)
    assert np.isnan([*two.interval, *two.interval_jackknife, two.pvalue, two.stderr]).all()
    constant = layer_bootstrap(heads_of(8).assign(D_head=0.1), draws=20)
    assert constant.reason == "x is constant"
    assert constant.n_degenerate == 20
    empty = layer_bootstrap(heads_of(8).assign(D_head=np.nan), draws=20)
    assert "0 rows" in empty.reason
    assert empty.n_dropped == 48


def test_what_cannot_be_resampled_is_refused():
    heads = heads_of(9)
    with pytest.raises(ValueError, match=r"give cluster=\('layer', 'kv_head'\)"):
        layer_bootstrap(heads, cluster="kv_head")
    with pytest.raises(ValueError, match="no column"):
        layer_bootstrap(heads, cluster="block")
    with pytest.raises(ValueError, match="at least one cluster"):
        layer_bootstrap(heads, cluster=())
    with pytest.raises(ValueError, match="two draws"):
        layer_bootstrap(heads, draws=1)
    with pytest.raises(ValueError, match="level"):
        layer_bootstrap(heads, level=95.0)


# --- attenuation ---


@methods
def test_attenuation_is_one_less_the_ratio(method):
    heads = heads_of(10)
    found = attenuation(heads, method=method)
    before = partial_spearman(heads["D_head"], heads["prev"], heads["dir_frac"], method=method)
    controls = heads[["dir_frac", "rope_imag_frac", "freq_centroid"]]
    after = partial_spearman(heads["D_head"], heads["prev"], controls, method=method)
    assert (found.before, found.after) == (before, after)
    assert found.statistic == 1 - after.statistic / before.statistic
    assert np.isnan(found.interval).all()
    assert "draws=0" in found.reason


def test_a_control_that_carries_everything_attenuates_everything_and_noise_nothing():
    rng = np.random.default_rng(0)
    n = 3000
    heads = pd.DataFrame(rng.standard_normal((n, 3)), columns=["carrier", "noise", "dir_frac"])
    heads["D_head"], heads["prev"] = (heads["carrier"] + rng.standard_normal(n) for _ in range(2))
    heads["layer"] = np.arange(n) // 100
    # Standard error of a correlation .018, of the share .04.
    assert attenuation(heads, ["carrier"]).statistic == pytest.approx(1, abs=0.15)
    assert attenuation(heads, ["noise"]).statistic == pytest.approx(0, abs=0.03)


def test_the_interval_of_a_share_comes_from_paired_resamples():
    heads = heads_of(11)
    found = attenuation(heads, ["rope_imag_frac"], draws=50, seed=2, level=0.8)
    shares = []
    for table in resamples(heads, ["layer"], 50, 2):
        pair = [["dir_frac"], ["dir_frac", "rope_imag_frac"]]
        before, after = (partial_spearman(table["D_head"], table["prev"], table[c]).statistic for c in pair)
        shares.append(1 - after / before)
    np.testing.assert_allclose(found.interval, np.quantile(shares, [0.1, 0.9]), rtol=1e-10)
    assert found.reason is None
    assert found.interval[0] < found.statistic < found.interval[1]


def test_a_share_of_what_may_be_nothing_has_no_interval():
    noise = heads_of(12).assign(D_head=np.random.default_rng(0).standard_normal(48))
    found = attenuation(noise, draws=100)
    assert "may be 0" in found.reason
    assert np.isnan(found.interval).all()
    assert "2 clusters" in attenuation(heads_of(12, layers=2), draws=20).reason


def test_both_sides_of_an_attenuation_use_the_same_rows():
    heads = heads_of(13)
    heads.loc[:4, "rope_imag_frac"] = np.nan
    found = attenuation(heads)
    assert (found.n, found.n_dropped) == (43, 5)
    assert found.before.n == found.after.n == 43


def test_attenuation_without_meaning_says_why():
    heads = heads_of(14)
    explained = attenuation(heads.assign(rope_imag_frac=2 * heads["D_head"]))
    assert explained.reason == "x is a linear function of the controls"
    assert np.isnan(explained.statistic)
    assert explained.before.reason is None
    with pytest.raises(ValueError, match="at least one control"):
        attenuation(heads, [])
    with pytest.raises(ValueError, match="two draws"):
        attenuation(heads, draws=1)


# --- intraclass correlation ---


def plain_anova(heads, column, cluster):
    table = anova_lm(smf.ols(f"{column} ~ C({cluster})", heads).fit())
    (between, within), (msb, msw) = table["sum_sq"], table["mean_sq"]
    return between / (between + within), msb, msw, table["PR(>F)"].iloc[0]


def test_it_is_the_analysis_of_variance():
    heads = heads_of(15)
    found = intraclass_correlation(heads, "D_head")
    eta_squared, msb, msw, pvalue = plain_anova(heads, "D_head", "layer")
    assert found.eta_squared == pytest.approx(eta_squared, rel=1e-10)
    assert found.statistic == pytest.approx((msb - msw) / (msb + 5 * msw), rel=1e-10)
    assert found.pvalue == pytest.approx(pvalue, rel=1e-9)
    assert found.design_effect == pytest.approx(1 + 5 * found.statistic, rel=1e-12)
    assert found.eta_squared_chance == 7 / 47
    assert (found.n, found.n_clusters) == (48, 8)


@given(seed=seeds, scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
@invariant
def test_units_mean_nothing_to_it(seed, scale, shift):
    heads = heads_of(seed)
    found = intraclass_correlation(heads, "D_head")
    moved = intraclass_correlation(heads.assign(D_head=-scale * heads["D_head"] + shift), "D_head")
    assert moved.statistic == pytest.approx(found.statistic, abs=1e-9)


def test_chance_is_taken_off():
    rng = np.random.default_rng(1)
    layer = np.repeat(np.arange(12), rng.integers(2, 6, 12))
    found = [
        intraclass_correlation(pd.DataFrame({"layer": layer, "x": rng.standard_normal(len(layer))}), "x")
        for _ in range(300)
    ]
    # sd .14 each, .008 of the mean; the share between clusters, chance left on, is .27 on average.
    assert np.mean([one.statistic for one in found]) == pytest.approx(0, abs=0.03)
    assert np.mean([one.eta_squared for one in found]) == pytest.approx(found[0].eta_squared_chance, abs=0.02)
    assert 0.2 < found[0].eta_squared_chance < 0.4
    assert np.mean([one.pvalue < 0.1 for one in found]) == pytest.approx(0.1, abs=0.06)


def test_it_finds_the_share_of_variance_that_a_group_has_in_common():
    heads = heads_of(16, layers=400, per_layer=4, shared=2.0).assign(x=lambda h: h["dir_frac"])
    # Variances 4 between and 1 within; standard error about .01. Copies of one head give 1, four heads for one.
    assert intraclass_correlation(heads, "x").statistic == pytest.approx(0.8, abs=0.05)
    copies = intraclass_correlation(heads.assign(x=heads["layer"] * 1.0), "x")
    assert copies.statistic == pytest.approx(1, abs=1e-12)
    assert copies.design_effect == pytest.approx(4, abs=1e-12)
    assert copies.pvalue == 0


def test_a_cluster_may_have_two_names():
    heads = heads_of(17)
    named = heads.assign(group=[f"{row.layer}.{row.kv_head}" for row in heads.itertuples()])
    assert intraclass_correlation(heads, "prev", ("layer", "kv_head")) == intraclass_correlation(named, "prev", "group")
    with pytest.raises(ValueError, match="numbered anew"):
        intraclass_correlation(heads, "prev", "kv_head")


@pytest.mark.parametrize(
    ("change", "cluster", "reason"),
    [
        ({"x": 0.1}, "layer", "column 'x' is constant"),
        ({"x": np.nan}, "layer", "0 clusters are fewer than 3"),
        ({"layer": 1}, "layer", "1 clusters are fewer than 3"),
        ({}, ("layer", "head"), "every cluster has one row"),
    ],
)
def test_what_has_no_intraclass_correlation_is_nan_with_a_reason(change, cluster, reason):
    heads = heads_of(18).assign(x=lambda h: h["D_head"]).assign(**change)
    found = intraclass_correlation(heads, "x", cluster)
    assert found.reason == reason
    assert np.isnan([found.statistic, found.pvalue, found.design_effect, found.eta_squared]).all()


def test_intraclass_rows_with_nan_are_counted_and_infinite_ones_refused():
    heads = heads_of(19)
    heads.loc[3, "D_head"] = np.nan
    found = intraclass_correlation(heads, "D_head")
    assert (found.n, found.n_dropped) == (47, 1)
    sizes = np.array([5, *[6] * 7])
    _, msb, msw, pvalue = plain_anova(heads.dropna(), "D_head", "layer")
    m = (47 - (sizes**2).sum() / 47) / 7
    assert found.statistic == pytest.approx((msb - msw) / (msb + (m - 1) * msw), rel=1e-10)
    assert found.pvalue == pytest.approx(pvalue, rel=1e-9)
    heads.loc[3, "D_head"] = np.inf
    with pytest.raises(ValueError, match="infinite"):
        intraclass_correlation(heads, "D_head")


def test_the_statistic_without_controls_is_spearmans():
    heads = heads_of(20)
    found = layer_bootstrap(heads, controls=(), draws=10)
    assert found.statistic == pytest.approx(scipy.stats.spearmanr(heads["D_head"], heads["prev"]).statistic, abs=1e-14)
