"""Other tasks beside the target: what they are called, their columns, and `excess_z`."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

import tlspectral as tls
from tlspectral.hooks.off_target import (
    beside_off_target,
    excess_z,
    least_z_differences,
    off_target_tasks,
    with_off_target,
)
from tlspectral.hooks.sweeps.sweep import ABLATION_SWEEP

TARGET = tls.logit_difference([[1, 2, 3]], 4, 5)


def named(name):
    return dataclasses.replace(TARGET, name=name)


def test_tasks_are_called_by_their_names():
    found = off_target_tasks([named("a b"), "language"], TARGET, seed=3, n_sequences=7)
    assert list(found) == ["a b", "language"]
    assert found["language"].prompts.n_sequences == 7
    assert off_target_tasks([], TARGET) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("language", "off_target is a list of tasks, .*; found 'language'"),
        (TARGET, "off_target is a list of tasks"),
        (None, "off_target is a list of tasks, .*; found None"),
        ([TARGET], r"two tasks would be called 'logit_difference' \(the target is 'logit difference'\)"),
        ([named("a b"), named("a_b")], "two tasks would be called 'a_b'"),
        (["other"], r"task must be a tls\.Task, 'induction' or 'language', not 'other'"),
    ],
)
def test_what_are_no_other_tasks_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        off_target_tasks(given, TARGET)


def test_every_column_of_another_task_is_described():
    schema = with_off_target(ABLATION_SWEEP, ["a b"])
    added = {column.name: column.meaning for column in schema.columns[len(ABLATION_SWEEP.columns) :]}
    assert list(added) == ["a_b_delta", "a_b_delta_se", "a_b_control_p", "a_b_control_p_floor", "a_b_excess_z"]
    assert all("the task a b" in meaning for meaning in added.values())
    with pytest.raises(ValueError, match="would have the column control_delta, which the sweep has: rename the task"):
        with_off_target(ABLATION_SWEEP, ["control"])


def test_z_is_the_place_of_an_effect_among_its_draws():
    draws = np.random.default_rng(0).standard_normal((4, 21)) * 3 + 1
    deltas = np.array([4.0, -2.0, 1.0, 0.0])
    expected = (deltas - draws.mean(1)) / np.sqrt(((draws - draws.mean(1, keepdims=True)) ** 2).sum(1) / 20)
    # Sums in another order: 1e-15.
    np.testing.assert_allclose(excess_z(deltas, draws.tolist()), expected, rtol=1e-12)
    np.testing.assert_allclose(excess_z(5 * deltas - 2, (5 * draws - 2).tolist()), expected, rtol=1e-12)  # no unit
    assert np.isnan(excess_z([1.0], [[0.3] * 19])).all()


def table(deltas, draws):
    tested = {"control_p": 0.05, "control_p_floor": 0.05, "control_draws": draws}
    return pd.DataFrame({"delta": deltas, "delta_se": 0.5, **tested})


def test_the_least_difference_is_of_the_task_that_is_most_like_the_target():
    draws = [[-1.0, 0.0, 1.0]] * 3
    both = beside_off_target(
        table([-5.0, 1.0, 2.0], draws),
        {"b": table([1.0, 4.0, 0.0], draws), "c c": table([2.0, 0.0, 0.0], [*draws[:2], [1.0] * 3])},
    )
    assert both["excess_z"].tolist() == [-5, 1, 2]
    assert both["c_c_excess_z"].tolist()[:2] == [2, 0]
    both["name"] = ["L0H0", "L0H1", "L0H2"]
    assert least_z_differences(both, ["b", "c c"]) == {"L0H0": 3.0, "L0H1": -3.0, "L0H2": None}
    both["position"] = "END"
    both.loc[1, "delta"] = np.nan  # a screen left it out
    assert least_z_differences(both, ["b"]) == {"L0H0 at END": 4.0, "L0H2 at END": 2.0}
