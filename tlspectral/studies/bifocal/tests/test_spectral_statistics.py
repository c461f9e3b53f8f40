"""Statistics of spectral experiments: intervals, paired differences, lock-in, chosen rates, summaries."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.bifocal.formal_languages import Dyck3
from tlspectral.studies.bifocal.language_runs import LanguageRun, chosen_rates
from tlspectral.studies.bifocal.languages import compared, differences_beyond, lock_in_step
from tlspectral.studies.bifocal.schedule import FULL
from tlspectral.studies.common.seed_intervals import paired_differences, t_interval


def test_t_interval_by_hand():
    found = t_interval(pd.Series([1.0, 2.0, 3.0, 4.0, 5.0]))
    reach = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)  # t table, 4 degrees of freedom
    assert found == pytest.approx({"mean": 3.0, "low": 3 - reach, "high": 3 + reach, "n": 5})
    assert math.isnan(t_interval(pd.Series([1.0]))["low"])


def test_differences_are_paired_over_seeds():
    table = pd.DataFrame(
        {
            "language": "a",
            "arm": ["standard"] * 3 + ["full"] * 3,
            "seed": [0, 1, 2, 2, 0, 1],
            "loss": [1.0, 5.0, 9.0, 9.5, 1.1, 5.3],
        }
    )
    (row,) = paired_differences(table, ["language"], "loss", reference="standard").to_dict("records")
    reach = 4.3026527 * np.std([0.1, 0.3, 0.5], ddof=1) / math.sqrt(3)
    assert (row["language"], row["arm"], row["n"]) == ("a", "full", 3)
    assert (row["mean"], row["low"], row["high"]) == pytest.approx((0.3, 0.3 - reach, 0.3 + reach))


def test_differences_beyond_leave_trained_sizes_out():
    table = pd.DataFrame(
        itertools.product(["dyck3"], ["standard", "full"], [0, 1], [4, 9, 10]),
        columns=["language", "arm", "seed", "size"],
    ).assign(accuracy=[1.0, 0.5, 0.3, 1.0, 0.5, 0.5, 0.1, 0.7, 0.5, 0.1, 0.8, 0.4])
    table["trained"] = table["size"] <= 8
    (row,) = differences_beyond(table).to_dict("records")
    assert (row["arm"], row["n"]) == ("full", 2)
    assert row["mean"] == pytest.approx((0.2 + 0.1) / 2)


def losses_of(values):
    return pd.DataFrame({"step": range(1, len(values) + 1), "loss": values})


def test_lock_in_is_the_first_halving_within_twenty_steps():
    jump = [1.0] * 100 + [0.3] * 50  # the mean of ten is 0.44 once eight of them have fallen
    assert lock_in_step(losses_of(jump), 0.0) == 108
    assert lock_in_step(losses_of([x + 0.2 for x in jump]), 0.2) == 108
    assert lock_in_step(losses_of([x + 0.2 for x in jump]), 0.0) == 109  # a floor that is wrong: 0.57 < 0.6 takes 9
    assert lock_in_step(losses_of([1.0] * 100 + [0.51] * 50), 0.0) is None
    slow = [2 ** (-step / 25) for step in range(200)]
    assert lock_in_step(losses_of(slow), 0.0) is None
    fast = [2 ** (-step / 15) for step in range(200)]
    assert lock_in_step(losses_of(fast), 0.0) == 30  # the first step with two windows
    assert lock_in_step(losses_of([1.0, 0.1] * 10), 0.0) is None  # too short for two windows


def test_the_lowest_loss_chooses_the_rate():
    def run(arm, rate, loss):
        return LanguageRun("a", arm, rate, 9), {"held_out": pd.DataFrame({"loss": [loss]})}

    runs = dict(
        [run("x", 1e-3, 0.5), run("x", 3e-3, 0.4), run("x", 1e-2, math.nan), run("y", 1e-3, 0.7), run("y", 3e-3, 0.7)]
    )
    table = chosen_rates(runs)
    assert table["chosen"].tolist() == [False, True, False, True, False]


def test_the_summary_is_that_of_the_rows():
    rows = [
        {"language": "dyck3", "arm": arm, "learning_rate": 1e-3, "seed": seed, "loss": loss, "accuracy": 1 - loss,
         "lock_in": math.nan if seed else 50.0}
        for arm, losses in {"standard": (0.5, 0.3), "full": (0.4, 0.1)}.items()
        for seed, loss in enumerate(losses)
    ]  # fmt: skip
    table = compared(pd.DataFrame(rows), FULL).set_index("arm")
    assert table["loss"].tolist() == pytest.approx([0.4, 0.25])
    assert math.isnan(table["loss_difference"]["standard"])
    assert table["loss_difference"]["full"] == pytest.approx(-0.15)
    assert table["accuracy_difference"]["full"] == pytest.approx(0.15)
    reach = 12.7062047 * 0.05 * math.sqrt(2) / math.sqrt(2)
    assert table["loss_difference_high"]["full"] == pytest.approx(-0.15 + reach)
    assert table["lock_ins"].tolist() == [1, 1]
    assert table["spectral_parameters"].tolist() == [0, 384]
    assert table["chance_loss"].iloc[0] == pytest.approx(Dyck3((4, 8)).chance_loss)
