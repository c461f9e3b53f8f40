"""Models left out one by one, and other numbers of top heads: the seven models of the paper, and plain loops."""

import numpy as np
import pandas as pd
import pytest
from described import assert_described
from test_stats_models import MEDIANS, SCHEMES, heads_of

from tlspectral.stats import model_permutation_test, top_head_percentile
from tlspectral.studies.fingerprint.statistics import leave_one_model_out, top_k_sensitivity


def test_leaving_out_each_of_the_seven_models():
    found = leave_one_model_out(pd.Series(MEDIANS), SCHEMES)
    assert_described(found)
    assert found["left_out"].tolist() == list(MEDIANS)
    assert found["separated"].all()
    assert found["reason"].tolist() == [None] * 7
    # Three and three without a model of the other schemes, four and two without one with RoPE.
    np.testing.assert_allclose(found["floor"], [2 / 20] * 4 + [1 / 15] * 3)
    np.testing.assert_allclose(found["pvalue"], found["floor"])
    assert found["n_permutations"].tolist() == [20] * 4 + [15] * 3
    assert found["gap"].min() == pytest.approx(0.527)


def test_the_only_model_of_a_group_cannot_be_left_out():
    found = leave_one_model_out({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": True, "b": False, "c": False})
    assert found["reason"].tolist() == ["a is the only model of its group", None, None]
    assert np.isnan(found.loc[0, "pvalue"])
    assert not found.loc[0, "separated"]
    assert found.loc[1, "pvalue"] == 1


def test_models_and_groups_must_name_each_other():
    with pytest.raises(ValueError, match=r"models \['b', 'c'\] have a value or a group"):
        leave_one_model_out({"a": 1.0, "b": 2.0}, {"a": 1, "c": 2})
    with pytest.raises(ValueError, match="two groups are compared"):
        leave_one_model_out({"a": 1.0, "b": 2.0}, {"a": 1, "b": 1})


# --- other numbers of top heads ---


def model_of(seed, sign):
    """Strong heads at the top (sign 1) or the bottom (-1) of the column."""
    heads = heads_of(seed)
    noise = np.random.default_rng(seed).normal(0, 0.05, len(heads))
    return heads.assign(D_head=sign * heads["prev"].rank() / len(heads) + noise)


def test_each_k_is_the_test_of_its_medians():
    tables = {f"rope{i}": model_of(i, 1) for i in range(2)} | {f"ape{i}": model_of(i + 5, -1) for i in range(3)}
    groups = {name: name[:-1] for name in tables}
    found = top_k_sensitivity(tables, groups, ks=(1, 3, 20))
    assert_described(found)
    assert found["k"].tolist() == [1, 3, 20]
    for row in found.itertuples():
        medians = {name: top_head_percentile(table, k=row.k).statistic for name, table in tables.items()}
        rope, ape = ([medians[name] for name in tables if groups[name] == group] for group in ("rope", "ape"))
        expected = model_permutation_test(rope, ape)
        assert (row.pvalue, row.floor) == (expected.pvalue, expected.floor)
        assert (row.gap, row.separated) == (expected.gap, expected.separated)
    assert found["separated"].tolist() == [True, True, False]
    assert found.loc[:1, "upper"].tolist() == ["rope", "rope"]
    turned = top_k_sensitivity(dict(reversed(tables.items())), groups, ks=(1, 3))
    assert turned["upper"].tolist() == ["rope", "rope"]


def test_a_model_with_too_few_heads_is_named():
    tables = {"big": heads_of(0), "small": heads_of(0, layers=1)}
    with pytest.raises(ValueError, match="small: k=10 heads were asked for, and 5"):
        top_k_sensitivity(tables, {"big": "a", "small": "b"}, ks=(10,))
