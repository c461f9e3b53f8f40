"""Rank correlations of columns pair by pair: scipy's numbers, the family of tests, what has no number."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from described import assert_described

from tlspectral.studies.fingerprint.statistics import spearman_table


def table_of(seed=0, n=60):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(rng.standard_normal((n, 4)), columns=["a", "b", "prev", "ind"])
    frame["prev"] += frame["a"]
    frame.loc[:1, "b"] = np.nan
    return frame.assign(same=1.0)


def test_every_pair_is_in_the_table_with_scipys_numbers():
    frame = table_of()
    found = spearman_table(frame, ["a", "b"], ["prev", "ind"])
    assert_described(found)
    assert list(zip(found["column"], found["against"], strict=True)) == [
        ("a", "prev"), ("a", "ind"), ("b", "prev"), ("b", "ind"),
    ]  # fmt: skip
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


def test_a_pair_without_a_correlation_is_no_test_of_the_family():
    found = spearman_table(table_of(), ["a", "same"], "prev")
    assert found["reason"].tolist() == [None, "a column is constant"]
    assert np.isnan(found.loc[1, ["statistic", "pvalue", "q"]].astype(float)).all()
    assert not found.loc[1, "significant"]
    assert found.loc[0, "q"] == found.loc[0, "pvalue"]
    assert "too few" in spearman_table(table_of(n=4), "b", "prev").loc[0, "reason"]


def test_the_table_refuses_what_it_cannot_read():
    with pytest.raises(ValueError, match=r"no column \['D_haed'\]; it has a, b"):
        spearman_table(table_of(), ["D_haed"], ["prev"])
    with pytest.raises(ValueError, match="alpha"):
        spearman_table(table_of(), ["a"], ["prev"], alpha=5.0)
    with pytest.raises(ValueError, match="column 'name' must hold numbers"):
        spearman_table(table_of().assign(name="L0H0"), ["name"], ["prev"])
    twice = pd.concat([table_of(), table_of()[["a"]]], axis=1)
    with pytest.raises(ValueError, match=r"more than one column called \['a'\]"):
        spearman_table(twice, ["a"], ["prev"])


def test_a_table_of_nothing_has_its_columns():
    assert "q" in spearman_table(table_of(), [], ["prev"])
