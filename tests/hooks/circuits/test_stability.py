"""Selection of edges over samples of pairs: errors, bootstrap shares and overlaps have known answers."""

import numpy as np
import pytest
import scipy.stats

from tlspectral.hooks.circuits import stability
from tlspectral.hooks.circuits.stability import _largest, estimate_errors, overlaps, selected_share


def test_errors_are_those_of_means_over_units():
    values = np.random.default_rng(0).normal(size=(9, 4))
    errors = estimate_errors(values / 9, np.ones(9, dtype=int))
    np.testing.assert_allclose(errors, scipy.stats.sem(values, axis=0), rtol=1e-12)
    # A unit of two equal pairs weighs twice: its terms are sums.
    sizes = np.array([2, 1, 1])
    terms = np.array([[2.0], [3.0], [5.0]]) / 4
    deviations = np.array([2 * (1.0 - 2.5), 3.0 - 2.5, 5.0 - 2.5])
    assert estimate_errors(terms, sizes)[0] == pytest.approx(np.sqrt(1.5 * (deviations**2).sum()) / 4)
    assert np.isnan(estimate_errors(terms[:1], sizes[:1])).all()


def test_an_edge_beyond_doubt_is_always_chosen_and_a_coin_half_of_the_time():
    rng = np.random.default_rng(0)
    sure, never = np.full(16, 9.0), np.zeros(16)
    twins = rng.normal(1.0, 0.5, size=(2, 16))  # two of one distribution, for one place
    twins += (1.0 - twins.mean(1))[:, None]
    shares = selected_share(np.column_stack([sure, *twins, never]), 2, seed=0)
    assert shares[[0, 3]].tolist() == [1.0, 0.0]
    assert shares[1] + shares[2] == pytest.approx(1.0)
    assert shares[1] == pytest.approx(0.5, abs=0.1)  # means are equal; the bootstrap has an error of .016, and a skew
    assert np.isnan(selected_share(sure[:1, None], 1, seed=0)).all()


def test_edges_without_an_estimate_are_not_chosen_to_fill_up():
    assert _largest(np.array([[0.0, -3.0, 0.0], [1.0, -3.0, 2.0]]), 2).tolist() == [
        [False, True, False],
        [False, True, True],
    ]


def test_overlaps_are_those_of_disjoint_parts_and_grow_with_their_size():
    rng = np.random.default_rng(1)
    size = np.concatenate([np.linspace(1.0, 2.0, 40), np.full(200, 0.2)])
    terms = size + rng.normal(0, 1.5, size=(64, 240))
    found = overlaps(terms, 30, seed=0)
    assert found["overlap_quarter"] < found["overlap_half"] < found["overlap_extrapolated"] < 1
    assert found["units_extrapolated"] > 32
    # What 64 units give is simulated by other units of the same law.
    again = [
        _largest(np.stack([(size + rng.normal(0, 1.5, size=(64, 240))).sum(0) for _ in range(2)]), 30)
        for _ in range(40)
    ]
    shares = [(one & two).sum() / (one | two).sum() for one, two in again]
    assert found["overlap_extrapolated"] == pytest.approx(np.mean(shares), abs=0.1)  # an extrapolation; .02 measured
    same = overlaps(np.tile(size, (16, 1)), 30, seed=0)
    assert same == {
        "overlap_half": 1.0,
        "overlap_quarter": 1.0,
        "overlap_extrapolated": None,
        "units_extrapolated": None,
    }
    assert overlaps(terms[:3], 30, seed=0)["overlap_half"] is None


def test_no_number_of_pairs_is_said_where_more_hardly_agree_better(monkeypatch):
    shares = {4: 0.5, 2: 0.4999}
    monkeypatch.setattr(stability, "_overlap", lambda terms, n, size, rng: shares[size])
    found = overlaps(np.zeros((8, 3)), 2, seed=0)
    assert found["overlap_extrapolated"] == pytest.approx(0.5001, abs=1e-4)
    assert found["units_extrapolated"] is None  # 10 ** 2400
    shares[2] = 0.1
    # 1 - index falls by 0.5 / 0.9 for each doubling: 4 * 5 ** (1 / log2(1.8)) pairs.
    assert overlaps(np.zeros((8, 3)), 2, seed=0)["units_extrapolated"] == 27
