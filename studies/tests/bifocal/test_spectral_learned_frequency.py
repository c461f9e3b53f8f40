"""One learnable frequency on tasks whose answer is known: rules, runs, shares, the figure and its command."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from tlspectral_studies.bifocal.experiments import QUICK_FREQUENCY, run_experiment
from tlspectral_studies.bifocal.learned_frequency import _judged, folded
from tlspectral_studies.common.seed_intervals import share_interval
from tlspectral_studies.positional_symbolic.canonical import (
    CanonicalRun,
    accuracy_by_position,
    angle_unit,
    train_canonical,
)
from tlspectral_studies.positional_symbolic.canonical.trainer import validation_prompts
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask
from typer.testing import CliRunner

from tlspectral.cli import app
from tlspectral.tables import read_table, write_table

UNIT = math.pi / 33


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The tables of a short run, and the folder."""
    folder = tmp_path_factory.mktemp("learned_frequency")
    run_experiment("learned-frequency", folder, heads=QUICK_FREQUENCY, command="once")
    names = ("headline_runs", "headline_paths", "headline_shares")
    return folder, *(read_table(folder / f"{name}.parquet") for name in names)


@given(st.floats(-200, 200), st.integers(-3, 3))
def test_folding_is_what_integer_positions_see(omega, laps):
    once, again, mirrored = (float(folded(np.array([value]))[0]) for value in (omega, omega + 66.0 * laps, -omega))
    assert 0 <= once <= 33
    # Rounding of the remainder: 1e-13; the unit or the period wrong is off by tenths.
    assert again == pytest.approx(once, abs=1e-9)
    assert mirrored == pytest.approx(once, abs=1e-9)
    position = np.arange(40)
    np.testing.assert_allclose(np.cos(position * UNIT * omega), np.cos(position * UNIT * once), atol=1e-9)


def test_success_is_judged_by_the_rules():
    rows = [
        ("retrieval", 0.049, 0.91, True),
        ("retrieval", -0.049, 0.91, True),
        ("retrieval", 0.051, 0.91, False),
        ("retrieval", 0.0, 0.9, False),
        ("index", 1.8, 0.1, True),
        ("index", -2.09, 0.1, True),
        ("index", 66.0 + 2.0, 0.1, True),
        ("index", 1.79, 1.0, False),
        ("index", 2.11, 1.0, False),
    ]
    runs = pd.DataFrame(rows, columns=["task", "learned", "accuracy", "expected"])
    assert _judged(runs)["success"].tolist() == runs["expected"].tolist()


def test_the_interval_of_a_share_is_wilsons():
    low, high = share_interval(46, 50)
    share, n, z = 46 / 50, 50, scipy.stats.norm.ppf(0.975)
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    reach = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    assert (low, high) == pytest.approx((centre - reach, centre + reach), abs=1e-12)  # rounding


@pytest.mark.slow
def test_every_start_and_seed_is_a_run_of_its_own(found):
    _, runs, paths, shares = found
    assert len(runs) == 2 * 10 * 5
    assert not runs[["task", "start", "seed"]].duplicated().any()
    first = paths[paths["step"] == 0]
    # float32 parameters of at most 0.2 radians, in units of 0.095.
    np.testing.assert_allclose(first["omega"], first["start"], atol=1e-6)
    last = paths[paths["step"] == QUICK_FREQUENCY.steps].merge(runs, on=["task", "start", "seed"])
    assert (last["omega"] == last["learned"]).all()
    assert (last["omega"] != last["start"]).mean() > 0.9
    for row in shares.itertuples():
        kept = runs[(runs["task"] == row.task) & ((runs["start"] >= 0.1) | (row.starts == "all"))]
        assert (row.runs, row.successes) == (len(kept), kept["success"].sum())
        assert row.low <= row.share == row.successes / row.runs <= row.high


@pytest.mark.slow
def test_a_run_is_that_of_the_trainer(found):
    _, runs, _, _ = found
    task = CanonicalTask("index")
    trained = train_canonical(
        task, [CanonicalRun((0.8 * angle_unit(task),), 3)], QUICK_FREQUENCY, learn_frequencies=True
    )
    row = runs.query("task == 'index' and start == 0.8 and seed == 3").iloc[0]
    assert row["learned"] == trained.model.frequencies.item() / angle_unit(task)  # stacked or alone: to the bit
    right = accuracy_by_position(trained.model, validation_prompts(task, QUICK_FREQUENCY))
    assert row["accuracy"] == right["correct"].sum() / right["n"].sum()


@pytest.mark.slow
def test_the_command_draws_what_is_there(found, tmp_path):
    folder, *_ = found
    done = CliRunner().invoke(app, ["study", "evolution", str(folder)])
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [str(folder / "learned_frequency.png")]
    rows = pd.DataFrame({"language": "dyck3", "arm": "omega", "seed": [0, 0, 1, 1], "step": [0, 1, 0, 1]})
    some = tmp_path / "some"
    some.mkdir()
    write_table(rows.assign(layer=0, head=0, frequency=0, omega=1.0), some / "trajectories.parquet")
    write_table(rows.assign(pairs="all", resonance=0.5), some / "resonance_steps.parquet")
    write_table(rows.assign(mean_abs=0.1, start_abs=0.1, drift=0.0), some / "phase_steps.parquet")
    done = CliRunner().invoke(app, ["study", "evolution", str(some)])
    names = [Path(line).name for line in done.stdout.splitlines()]
    assert names == ["frequencies_dyck3.png", "resonance_dyck3.png", "phases_dyck3.png"]
    refused = CliRunner().invoke(app, ["study", "evolution", str(tmp_path)])
    assert refused.exit_code == 2
    assert "has no tables to draw" in refused.output
