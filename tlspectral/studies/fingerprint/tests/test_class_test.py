"""A class of heads against the rest: residuals against statsmodels, reasons, missing values."""

import numpy as np
import pandas as pd
import pytest
from statsmodels.regression.linear_model import OLS

from tlspectral.stats import mann_whitney, rank_biserial
from tlspectral.studies.fingerprint.class_test import class_test


def heads_of(seed=0, n=80):
    rng = np.random.default_rng(seed)
    heads = pd.DataFrame({"dir_frac": rng.uniform(0.5, 0.8, n), "prev": rng.beta(0.3, 2, n)})
    heads["D_head"] = heads["dir_frac"] + 0.3 * (heads["prev"] > 0.3) + 0.1 * rng.standard_normal(n)
    return heads


def test_a_class_is_compared_by_its_residuals():
    heads = heads_of()
    found = class_test(heads, threshold=0.3)
    left = OLS(heads["D_head"], np.column_stack([np.ones(80), heads["dir_frac"]])).fit().resid.to_numpy()
    above = heads["prev"].to_numpy() > 0.3
    expected = mann_whitney(left[above], left[~above])
    assert found.statistic == pytest.approx(expected.rank_biserial, abs=1e-12)
    assert found.pvalue == pytest.approx(expected.pvalue, rel=1e-10)
    assert (found.n, found.n_class) == (80, above.sum())
    assert found.statistic > 0.5


def test_a_class_can_be_compared_without_controls():
    heads = heads_of(1)
    above = heads["prev"] > 0.2
    expected = rank_biserial(heads["D_head"][above], heads["D_head"][~above])
    assert class_test(heads, threshold=0.2, controls=()).statistic == expected


def test_the_threshold_itself_is_not_above_it():
    heads = heads_of(2)
    assert class_test(heads, threshold=heads["prev"].nlargest(4).min()).n_class == 3


@pytest.mark.parametrize(
    ("change", "threshold", "reason"),
    [
        ({}, 2.0, "no head has prev above 2.0"),
        ({}, -1.0, "every head has prev above -1.0"),
        ({"D_head": 0.1}, 0.3, "D_head is constant"),
        ({"D_head": lambda h: 2 * h["dir_frac"] - 1}, 0.3, "D_head is a linear function of the controls"),
        ({"D_head": np.nan}, 0.3, "no head has prev"),
    ],
)
def test_a_class_without_a_comparison_is_nan_with_a_reason(change, threshold, reason):
    found = class_test(heads_of().assign(**change), threshold=threshold)
    assert reason in found.reason
    assert np.isnan([found.statistic, found.pvalue]).all()


def test_class_rows_with_nan_are_counted_and_infinite_ones_refused():
    heads = heads_of()
    heads.loc[[0, 1], "D_head"] = np.nan
    found = class_test(heads, threshold=0.3)
    assert (found.n, found.n_dropped) == (78, 2)
    heads.loc[5, "dir_frac"] = np.inf
    with pytest.raises(ValueError, match="infinite"):
        class_test(heads, threshold=0.3)
