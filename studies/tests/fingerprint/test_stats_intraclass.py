"""The intraclass correlation, against the analysis of variance of statsmodels."""

import numpy as np
import pandas as pd
import pytest
import statsmodels.formula.api as smf
from layered_heads import heads_of
from statsmodels.stats.anova import anova_lm
from tlspectral_studies.fingerprint.statistics import intraclass_correlation

pytestmark = pytest.mark.lowest


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
    moved = intraclass_correlation(heads.assign(D_head=-3 * heads["D_head"] + 2), "D_head")
    assert moved.statistic == pytest.approx(found.statistic, abs=1e-9)
    named = heads.assign(group=[f"{row.layer}.{row.kv_head}" for row in heads.itertuples()])
    assert intraclass_correlation(heads, "prev", ("layer", "kv_head")) == intraclass_correlation(named, "prev", "group")
    copies = intraclass_correlation(heads.assign(x=heads["layer"] * 1.0), "x")
    assert (copies.statistic, copies.design_effect) == pytest.approx((1, 6), abs=1e-12)
    assert copies.pvalue == 0


@pytest.mark.parametrize(
    ("change", "cluster", "reason"),
    [
        ({"x": 0.1}, "layer", "column 'x' is constant"),
        ({"x": np.nan}, "layer", "0 clusters are fewer than 3"),
        ({"layer": 1, "head": range(48)}, "layer", "1 clusters are fewer than 3"),
        ({}, ("layer", "head"), "every cluster has one row"),
    ],
)
def test_what_has_no_intraclass_correlation_is_nan_with_a_reason(change, cluster, reason):
    heads = heads_of(18).assign(x=lambda h: h["D_head"]).assign(**change)
    found = intraclass_correlation(heads, "x", cluster)
    assert found.reason == reason
    assert np.isnan([found.statistic, found.pvalue, found.design_effect, found.eta_squared]).all()


def test_clusters_of_unlike_size_and_rows_with_nan():
    heads = heads_of(19)
    heads.loc[3, "D_head"] = np.nan
    found = intraclass_correlation(heads, "D_head")
    assert (found.n, found.n_dropped) == (47, 1)
    sizes = np.array([5, *[6] * 7])
    _, msb, msw, pvalue = plain_anova(heads.dropna(), "D_head", "layer")
    m = (47 - (sizes**2).sum() / 47) / 7
    assert found.statistic == pytest.approx((msb - msw) / (msb + (m - 1) * msw), rel=1e-10)
    assert found.pvalue == pytest.approx(pvalue, rel=1e-9)


def test_heads_of_several_models_are_clusters_of_their_own_where_the_model_is_named():
    """Without it layer 0 of one model would be one cluster with layer 0 of the other."""
    models = [heads_of(20).assign(model="a"), heads_of(21).assign(model="b")]
    heads = pd.concat(models, ignore_index=True)
    found = intraclass_correlation(heads, "D_head", ("model", "layer"))
    assert found.n_clusters == sum(table["layer"].nunique() for table in models)
    named = heads.assign(layer=heads["model"] + heads["layer"].astype(str), head=range(len(heads)))
    assert intraclass_correlation(named.drop(columns="model"), "D_head") == found
