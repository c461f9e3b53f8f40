"""Intervals over layers, attenuation: plain loops, exact cases, coverage."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from layered_heads import heads_of

from tlspectral.stats import attenuation, layer_bootstrap, partial_spearman

pytestmark = pytest.mark.lowest

methods = pytest.mark.parametrize("method", ["hybrid", "rank"])


def resamples(heads, draws, seed):
    """Tables of resampled layers, by the definition."""
    members = [group for _, group in heads.groupby("layer")]
    drawn = np.random.default_rng(seed).integers(len(members), size=(draws, len(members)))
    return [pd.concat([members[place] for place in chosen], ignore_index=True) for chosen in drawn]


# --- the interval ---


@pytest.mark.slow
@methods
def test_it_is_the_loop_over_resampled_tables(method):
    heads = heads_of(1)
    found = layer_bootstrap(heads, method=method, draws=60, level=0.9, seed=4)
    draws = np.array(
        [
            partial_spearman(table["D_head"], table["prev"], table["dir_frac"], method=method).statistic
            for table in resamples(heads, 60, 4)
        ]
    )
    np.testing.assert_allclose(found.interval, np.quantile(draws, [0.05, 0.95]), rtol=1e-12)
    assert found.se == pytest.approx(draws.std(ddof=1), rel=1e-12)
    assert (
        found.statistic == partial_spearman(heads["D_head"], heads["prev"], heads["dir_frac"], method=method).statistic
    )
    rest = [layer_bootstrap(heads[heads["layer"] != layer], method=method, draws=2).statistic for layer in range(8)]
    law = scipy.stats.t(7, found.statistic, np.std(rest) * np.sqrt(7))
    assert found.interval_jackknife == pytest.approx((max(-1, law.ppf(0.05)), min(1, law.ppf(0.95))), rel=1e-9)
    assert found.pvalue == pytest.approx(2 * min(law.cdf(0), law.sf(0)), rel=1e-9)
    assert (found.n, found.draws, found.n_degenerate, found.seed) == (48, 60, 0, 4)
    assert found.n_clusters == 8


def test_a_seed_gives_one_result_whatever_the_order_of_rows():
    heads = heads_of(3)
    found = layer_bootstrap(heads, draws=30, seed=5)
    assert found == layer_bootstrap(heads, draws=30, seed=5)
    shuffled = layer_bootstrap(heads.sample(frac=1, random_state=0), draws=30, seed=5)
    np.testing.assert_allclose(shuffled.interval, found.interval, atol=1e-12)
    assert layer_bootstrap(heads, draws=30, seed=6).interval != found.interval


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
    assert np.isnan([*few.interval, *few.interval_jackknife, few.pvalue, few.se]).all()


def test_a_layer_that_alone_carries_the_correlation_leaves_no_p():
    heads = heads_of(8)
    heads["prev"] = heads["prev"].where(heads["layer"] == 3, 0.0)
    found = layer_bootstrap(heads, draws=400)
    # Without layer 3, which is in 1 - (7/8)^8 = 66 % of resamples, prev is constant.
    assert np.isfinite(found.interval).all()
    assert np.isnan([*found.interval_jackknife, found.pvalue]).all()
    assert "without one of the clusters" in found.reason


def test_what_has_no_value_is_left_out_and_what_has_no_interval_is_nan_with_a_reason():
    lacking = heads_of(6).astype({"layer": float})
    lacking.loc[0, "D_head"], lacking.loc[7, "layer"] = np.nan, np.nan
    found, expected = layer_bootstrap(lacking, draws=20), layer_bootstrap(lacking.drop(index=[0, 7]), draws=20)
    assert found.n_dropped == 2
    assert (found.n, found.interval) == (expected.n, expected.interval)
    two = layer_bootstrap(heads_of(8, layers=2), draws=20)
    assert two.reason == "2 clusters are fewer than 3"
    assert np.isfinite(two.statistic)
    assert np.isnan([*two.interval, *two.interval_jackknife, two.pvalue, two.se]).all()
    constant = layer_bootstrap(heads_of(8).assign(D_head=0.1), draws=20)
    assert constant.reason == "x is constant"
    assert constant.n_degenerate == 20
    empty = layer_bootstrap(heads_of(8).assign(D_head=np.nan), draws=20)
    assert "0 rows" in empty.reason
    assert empty.n_dropped == 48


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


def test_the_interval_of_a_share_comes_from_paired_resamples():
    heads = heads_of(11)
    found = attenuation(heads, ["rope_imag_frac"], draws=50, seed=2, level=0.8)
    shares = []
    for table in resamples(heads, 50, 2):
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


def test_attenuation_without_meaning_says_why():
    heads = heads_of(14)
    explained = attenuation(heads.assign(rope_imag_frac=2 * heads["D_head"]))
    assert explained.reason == "x is a linear function of the controls"
    assert np.isnan(explained.statistic)
    assert explained.before.reason is None
    nothing = pd.DataFrame({"layer": 0, "x": [0, 1, 0, 1, 0, 1], "y": [0, 0, 1, 1, 2, 2], "c": [1, 2, 4, 3, 5, 9]})
    found = attenuation(nothing, ["c"], x="x", y="y", base=())
    assert found.before.statistic == 0
    assert found.reason == "there is no correlation to attenuate"
    assert np.isnan(found.statistic)
    heads.loc[:4, "rope_imag_frac"] = np.nan  # both sides are of the same rows
    found = attenuation(heads)
    assert (found.n, found.n_dropped) == (43, 5)
    assert found.before.n == found.after.n == 43
