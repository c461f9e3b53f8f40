"""Top heads within a model, permutation of models: enumeration, relabelings, the seven models of the paper."""

import itertools

import numpy as np
import pytest
import scipy.stats
from heads_of_models import MEDIANS, SCHEMES, heads_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tlspectral.stats import model_permutation_test, top_head_percentile

pytestmark = pytest.mark.lowest

invariant = settings(max_examples=30, derandomize=True)
seeds = st.integers(0, 2**32 - 1)
few = st.lists(st.integers(-4, 4).map(float), min_size=1, max_size=5)
alternatives = pytest.mark.parametrize("alternative", ["two-sided", "less", "greater"])


# --- top heads ---


@given(seed=seeds, k=st.integers(1, 20))
@invariant
def test_percentiles_are_ranks_over_n(seed, k):
    heads = heads_of(seed)
    found = top_head_percentile(heads, k=k)
    top = heads.nlargest(k, "prev")
    expected = [(heads["D_head"] <= value).mean() for value in top["D_head"]]
    np.testing.assert_allclose(found.percentiles, expected, rtol=1e-12)
    assert found.statistic == pytest.approx(np.median(expected), rel=1e-12)
    assert found.statistic_midrank == pytest.approx(np.median(expected) - 0.5 / 20, rel=1e-12)
    assert found.heads == tuple(zip(top["layer"], top["head"], strict=True))
    assert (found.n, found.n_dropped, found.tied_at_border) == (20, 0, 0)


def test_ties_of_the_column_share_their_mean_rank():
    heads = heads_of(2).assign(D_head=[0.0] * 10 + [1.0] * 10)
    found = top_head_percentile(heads, k=20)
    assert set(found.percentiles) == {5.5 / 20, 15.5 / 20}


def test_a_tie_at_the_border_goes_to_the_lower_layer_then_the_lower_head():
    heads = heads_of(3).assign(prev=0.0)
    heads.loc[heads["layer"] >= 2, "prev"] = 0.5
    heads.loc[heads["layer"] == 1, "prev"] = 0.9
    found = top_head_percentile(heads.iloc[::-1], k=7)
    assert found.heads == ((1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (2, 0), (2, 1))
    assert found.tied_at_border == 8
    assert top_head_percentile(heads, k=15).tied_at_border == 0


def test_a_head_without_a_column_is_not_ranked_and_one_without_behaviour_not_taken():
    heads = heads_of(4)
    best = int(heads["prev"].idxmax())
    lost = heads.assign(prev=heads["prev"].where(heads.index != best))
    found = top_head_percentile(lost, k=1)
    assert found.n == 20
    assert found.n_dropped == 1
    second = heads.nlargest(2, "prev").iloc[1]
    assert found.statistic == (heads["D_head"] <= second["D_head"]).mean()
    unranked = top_head_percentile(heads.assign(D_head=heads["D_head"].where(heads.index != best)), k=1)
    assert (unranked.n, unranked.n_dropped) == (19, 1)
    assert unranked.heads == found.heads


# --- permutation of models ---


def enumerated(x, y, alternative):
    """p by listing every labeling; sums of small integers, so nothing rounds but the division."""
    pooled, extremes = [*x, *y], []
    for chosen in itertools.combinations(range(len(pooled)), len(x)):
        rest = [pooled[i] for i in range(len(pooled)) if i not in chosen]
        difference = np.mean([pooled[i] for i in chosen]) - np.mean(rest)
        extremes.append({"two-sided": abs(difference), "less": -difference, "greater": difference}[alternative])
    extremes = np.round(extremes, 9)
    return (extremes >= extremes[0]).mean(), (extremes == extremes.max()).mean()


@pytest.mark.slow
@alternatives
@given(x=few, y=few)
@invariant
def test_it_is_the_enumeration_of_all_labelings(alternative, x, y):
    found = model_permutation_test(x, y, alternative=alternative)
    pvalue, floor = enumerated(x, y, alternative)
    assert found.pvalue == pytest.approx(pvalue)
    assert found.floor == pytest.approx(floor)
    assert found.pvalue >= found.floor >= 1 / found.n_permutations * (1 - 1e-12)
    assert found.statistic == pytest.approx(np.mean(x) - np.mean(y))
    assert found.separated == (min(x) > max(y) or min(y) > max(x))
    assert found.gap == max(min(x) - max(y), min(y) - max(x))


@given(x=few, y=few, scale=st.sampled_from([1e-9, 0.1, 3.0]), shift=st.floats(-1, 1))
@invariant
def test_units_mean_nothing_to_it(x, y, scale, shift):
    moved = model_permutation_test(scale * (np.array(x) + shift), scale * (np.array(y) + shift))
    expected = model_permutation_test(x, y)
    assert (moved.pvalue, moved.floor) == (expected.pvalue, expected.floor)


def test_the_seven_models_of_the_paper():
    other, rope = ([MEDIANS[m] for m in MEDIANS if SCHEMES[m] == scheme] for scheme in ("other", "rope"))
    found = model_permutation_test(other, rope)
    assert found.separated
    assert found.gap == pytest.approx(0.527)
    assert found.n_permutations == 35
    assert found.pvalue == found.floor == pytest.approx(1 / 35)
    expected = scipy.stats.permutation_test(
        (other, rope), lambda x, y: abs(np.mean(x) - np.mean(y)), n_resamples=np.inf, alternative="greater"
    )
    assert found.pvalue == pytest.approx(expected.pvalue)
