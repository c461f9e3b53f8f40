"""Fieller's interval of a ratio: a t test inverted, its coverage, and when there is none."""

import numpy as np
import pytest
import scipy.stats

from tlspectral.stats.ratio import LEAST_SPREAD, ratio_interval, unseen_share


def test_its_ends_are_where_a_t_test_begins_to_reject():
    rng = np.random.default_rng(0)
    whole = rng.normal(5, 2, size=12)
    part = 0.7 * whole + rng.normal(size=12)
    low, high = ratio_interval(part, whole)
    assert low < part.mean() / whole.mean() < high
    for end in (low, high):
        assert scipy.stats.ttest_1samp(part - end * whole, 0).pvalue == pytest.approx(0.05, abs=1e-9)
    narrow = ratio_interval(part, whole, level=0.5)
    assert low < narrow[0] < narrow[1] < high


def test_it_covers_what_it_says():
    rng, covered = np.random.default_rng(0), []
    for _ in range(2_000):
        whole = rng.normal(5, 2, size=8)
        low, high = ratio_interval(0.7 * whole + rng.normal(size=8), whole)
        covered.append(low <= 0.7 <= high)
    # 2,000 tables have an error of .005; percentiles of a bootstrap cover .87 here.
    assert np.mean(covered) == pytest.approx(0.95, abs=0.02)


def test_no_finite_interval_is_nan():
    assert np.isnan(ratio_interval(np.ones(1), np.ones(1))).all()
    assert np.isnan(ratio_interval(np.array([1.0, 2.0, 3.0]), np.array([-1.0, 1.0, 0.5]))).all()


def test_pairs_that_do_not_vary_have_no_interval():
    # A circuit that fails on 5 % of pairs: two in three samples of 8 hold no failure, and would give [1.00, 1.00].
    whole = np.random.default_rng(0).normal(5, 1, size=8)
    noise = np.random.default_rng(1).normal(size=8)
    residuals = noise - noise.mean() / whole.mean() * whole
    edge = LEAST_SPREAD * whole.mean() / residuals.std(ddof=1)
    assert np.isnan(ratio_interval(0.7 * whole, whole)).all()
    assert np.isnan(ratio_interval(0.7 * whole + 0.999 * edge * noise, whole)).all()
    low, high = ratio_interval(0.7 * whole + 1.001 * edge * noise, whole)
    assert low < 0.7 < high
    assert np.isnan(ratio_interval(-0.7 * whole, -whole)).all()  # a negative gap is a gap


def test_a_share_that_n_draws_miss():
    for n in (1, 8, 32):
        assert (1 - unseen_share(n)) ** n == pytest.approx(0.05, abs=1e-12)
    assert unseen_share(8) == pytest.approx(0.312, abs=1e-3)
    assert unseen_share(8, level=0.5) < unseen_share(8)
