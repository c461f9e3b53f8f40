"""An effect counted among the effects of random draws: excess, p and z, and the smallest p that there can be."""

import numpy as np
import pytest

from tlspectral.tasks.control_tests import FEWEST_DRAWS, beside_control, control_test, draws_floor, excess_z


def by_hand(delta, effects):
    """Excess and p of one effect beside its control effects, counted one by one."""
    larger = sum(1 for effect in effects if abs(effect) >= abs(delta))
    return abs(delta) - sum(abs(effect) for effect in effects) / len(effects), (1 + larger) / (1 + len(effects))


def test_an_effect_is_counted_among_its_draws():
    rng = np.random.default_rng(0)
    deltas, effects = rng.standard_normal(6), np.round(rng.standard_normal((6, 7)), 1)
    deltas[0] = -effects[0, 3]  # a tie counts as large
    for delta, row, excess, pvalue in zip(deltas, effects, *control_test(deltas, effects), strict=True):
        assert (excess, pvalue) == pytest.approx(by_hand(delta, row), rel=1e-12)


def test_an_effect_that_is_one_of_its_draws_is_significant_as_often_as_it_should():
    """Each of 20 values in turn is the effect, and the other 19 are its draws: one of them has p = .05."""
    values = np.random.default_rng(0).standard_cauchy(20)
    pvalues = [control_test(values[[i]], np.delete(values, i)[None])[1].item() for i in range(20)]
    assert sorted(pvalues) == pytest.approx(np.arange(1, 21) / 20)


@pytest.mark.parametrize("draws", [1, 3, 19])
def test_the_floor_is_the_p_of_an_effect_beyond_all_draws(draws):
    """Ties among the draws do not move it, and draws that were not found do not count."""
    drawn_effects = np.round(np.random.default_rng(draws).standard_normal((2, draws + 2)), 0)
    drawn_effects[0, draws:] = np.nan
    columns = beside_control(np.full((2, 4), 50.0), np.repeat(drawn_effects[..., None], 4, axis=2), None)
    assert list(columns["control_p"]) == list(columns["control_p_floor"]) == [1 / (1 + draws), 1 / (3 + draws)]
    assert draws_floor(draws) == 1 / (1 + draws)
    none = beside_control(np.ones((2, 4)), np.full((2, draws, 4), np.nan), None)
    assert np.isnan([*none["control_p"], *none["control_p_floor"], draws_floor(0)]).all()


def test_z_is_the_place_of_an_effect_among_its_draws():
    draws = np.random.default_rng(0).standard_normal((4, 21)) * 3 + 1
    deltas = np.array([4.0, -2.0, 1.0, 0.0])
    expected = (deltas - draws.mean(1)) / np.sqrt(((draws - draws.mean(1, keepdims=True)) ** 2).sum(1) / 20)
    # Sums in another order: 1e-15.
    np.testing.assert_allclose(excess_z(deltas, draws), expected, rtol=1e-12)
    np.testing.assert_allclose(excess_z(5 * deltas - 2, 5 * draws - 2), expected, rtol=1e-12)  # no unit
    assert np.isnan(excess_z(np.ones(1), np.full((1, 19), 0.3))).all()
    assert np.isnan(excess_z(np.ones(1), np.ones((1, 1)))).all()


def test_z_is_missing_with_few_draws():
    """Draws that were asked for and not found, as a band has them, leave those that were."""
    controls = np.repeat(np.random.default_rng(1).standard_normal((3, FEWEST_DRAWS, 1)), 4, axis=2)
    found = beside_control(np.ones((3, 4)), controls, None)
    np.testing.assert_array_equal(found["excess_z"], excess_z(np.ones(3), controls.mean(2)))
    assert np.isnan(beside_control(np.ones((3, 4)), controls[:, 1:], None)["excess_z"]).all()
    controls[0, 7:], controls[1] = np.nan, np.nan
    some = beside_control(np.ones((3, 4)), controls, None)["excess_z"]
    assert some[0] == excess_z(np.ones(1), controls[:1, :7].mean(2))[0]
    assert np.isnan(some[1])
    assert some[2] == found["excess_z"][2]
