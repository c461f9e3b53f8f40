"""The order of events while a circuit forms: rows of a small run, and the words of the schedule for rows made up."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from constrained_preset import TINY
from tlspectral_studies.fingerprint.formation_layers import agreeing_seeds, crossing_step
from typer.testing import CliRunner

import tlspectral as tls

STORED = Path(__file__).parents[3] / "docs/results/constrained"
ARM_NAMES = ("ape_free", "ape_sym", "rope_free", "rope_sym", "rope_imag")


@pytest.fixture
def order(import_benchmark):
    return import_benchmark("formation_order")


def test_a_stretch_lasts_to_the_end(order):
    steps = pd.Series([0, 100, 200, 225, 250])

    def found(*reached):
        return order.lasting_from(steps, pd.Series(reached, dtype=bool))

    assert found(0, 1, 0, 1, 1) == 225
    assert found(1, 1, 1, 1, 1) == 0
    assert found(0, 0, 0, 0, 1) == 250
    assert np.isnan(found(1, 1, 1, 1, 0))


def rows(median=300, phase=500, prev=550, formed=600):
    made = []
    for seed in range(3):
        for arm in ARM_NAMES:
            row = {"arm": arm, "seed": seed, "head": "L0H0", "median_from": median, "prev_first": prev}
            row |= {"window_from": formed - 300, "last_step": formed + 200}
            row |= {"prev_from": prev, "formed_loss": formed, "formed_both": formed, "formed_loss_100": formed}
            row |= {"phase_first": phase, "phase_from": phase, "formed_both_100": formed}
            made.append(row if arm.startswith("rope") else row | {"phase_first": np.nan, "phase_from": np.nan})
    return pd.DataFrame(made)


@pytest.mark.slow
def test_the_words_follow_the_order_of_events(order):
    said = order.answers(rows())
    # Six of six: the lower end of the exact interval is .025 ** (1 / 6) = .54.
    assert "Q2, free arms: median_from before formed_loss in 6 of 6 runs [0.54, 1.00]" in said
    assert "3 of 3 seeds; mean lead 300 steps [300, 300], 300 to 300: contradicted" in said
    assert "Q1, rotary arms: phase_from before prev_from in 9 of 9" in said
    assert "the other first in 0; sign test p = 0.004: contradicted" in said
    assert "prev first: prev_from before formed_loss in 15 of 15 runs [0.78, 1.00]" in said
    later = order.answers(rows(median=700, phase=550, prev=np.nan))
    assert "in 0 of 6 runs [0.00, 0.46], at the same step in 0" in later
    assert "700: confirmed" not in later
    assert "-100 to -100: confirmed" in later
    assert "in 9 of 9 runs" in later  # an event that never comes is the later one
    same = order.answers(rows(phase=550))
    assert "Q1, rotary arms: phase_from before prev_from in 0 of 9 runs [0.00, 0.34], at the same step in 9" in same
    assert "sign test p = nan: not contradicted" in same
    mixed = rows()
    mixed.loc[mixed["arm"] == "ape_free", "median_from"] = 650
    assert "in 3 of 6 runs [0.12, 0.88], at the same step in 0; all runs of a seed: 0 of 3" in order.answers(mixed)


def test_the_page_gives_the_answers_of_the_stored_rows(order):
    said = order.answers(pd.read_csv(STORED / "formation_order.csv"))
    page = " ".join((STORED.parent / "formation_order.md").read_text(encoding="utf-8").split())
    for answer, in_words in (
        ("Q2, free arms: median_from before formed_loss in 6 of 6 runs [0.54, 1.00]", "6 of 6 free runs (.54 to 1)"),
        ("3 of 3 seeds; mean lead 542 steps [505, 584], 275 to 825: contradicted", "542 steps (505 to 584), least 275"),
        ("all arms: median_from before formed_loss in 15 of 15 runs [0.78, 1.00]", "15 of 15 (.78 to 1)"),
        ("rotary arms: phase_from before prev_from in 3 of 9 runs [0.07, 0.70], at the same step in 4", "first in 3,"),
        ("mean lead 22 steps [-4, 42], -75 to 150; the other first in 2", "22 steps (-4 to 42), from -75 to 150"),
        ("sign test p = 1.000: not contradicted", "(sign test p = 1)"),
        ("phase_first before prev_first in 7 of 9 runs [0.40, 0.97]", "7 of 9 runs (.40 to .97; p = .07)"),
        ("-25 to 1700; the other first in 1; sign test p = 0.070", "by up to 1,700 steps"),
        ("prev first: prev_from before formed_loss in 0 of 15 runs [0.00, 0.22]", "0 of 15 runs (0 to .22)"),
        ("mean lead -77 steps [-96, -61], -200 to -25: contradicted", "25 to 200 steps after it in 14"),
        ("prev_from before formed_both in 0 of 15 runs [0.00, 0.22], at the same step in 3", "the same step in 3"),
        ("phase_from before formed_loss in 2 of 9 runs [0.03, 0.60]", "in 2 of 9 runs (.03 to .60)"),
        ("of 15 runs 15 form at the published step by the loss, 15 by both; 15 have the head", "all 15 runs form at"),
    ):
        assert answer in said
        assert in_words in page
    for name in ("Q2, free arms", "Q2, all arms", "Q1", "Q1, first crossing", "prev, by the loss", "phase"):
        [line] = [line for line in said.splitlines() if line.startswith(f"{name}: first in")]
        assert line.endswith("least p 0.25, finds a share of inf: no power")
    assert "Three seeds allow no p below .25" in page


def test_the_page_gives_the_fall_by_layer(order):
    said, page = order.by_layer(), (STORED.parent / "formation_order.md").read_text(encoding="utf-8")
    falls = order.layers_of_free_runs()
    assert falls.groupby("layer").size().to_dict() == {"0": 10, "1": 10, "both": 10}
    shares, halves, onsets = [], [], []
    for _, own in falls.groupby("layer"):
        low, high = (f"{value:.2f}".removeprefix("0") for value in (own["share"].min(), own["share"].max()))
        shares.append(f"{low} to {high}")
        halves.append(f"{own['half_after'].sum()} of 10")
        onsets.append(f"{own['onset_after'].sum()} of 10")
    for row, cells in (("share of the fall", shares), ("half of the fall", halves), ("its onset", onsets)):
        [line] = [line for line in page.splitlines() if line.startswith(f"| {row}")]
        assert line.endswith(f"| {' | '.join(cells)} |")
    for line in ("eventual head before ind at 0.5: 0 of 25", "best head before loss at 0.1: 20 of 25",
                 "best head before loss at 0.2: 15 of 25", "best head before loss at 0.3: 6 of 25",
                 "summed over layer 0 before ind at half of its way: 15 of 25"):  # fmt: skip
        assert line in said
    assert "5 of 5 seeds (Holm 0.375); least p 0.0625" in said


def test_a_crossing_is_between_two_evaluations():
    steps = np.array([0.0, 100.0, 200.0])
    assert crossing_step(steps, np.array([0.6, 0.5, 0.4]), 0.45) == pytest.approx(150)
    assert crossing_step(steps, np.array([0.0, 0.5, 0.2]), 0.25) == pytest.approx(50)
    assert crossing_step(steps, np.array([0.6, 0.5, 0.4]), 0.6) == 0
    assert np.isnan(crossing_step(steps, np.array([0.6, 0.5, 0.4]), 0.3))


def test_the_seed_is_the_unit_and_a_seed_whose_arms_differ_is_not_ordered():
    flags = {"seed": [0, 0, 1, 1, 2, 2], "after": [True, True, True, False, False, False]}
    assert agreeing_seeds(pd.DataFrame(flags), "after") == (1, 3, 1.0)
    always = pd.DataFrame({"seed": range(6), "after": True})
    assert agreeing_seeds(always, "after") == (6, 6, 2 / 64)


@pytest.mark.slow
def test_a_run_is_measured_and_not_trained_again(order, tmp_path, monkeypatch):
    small = replace(TINY, training=replace(TINY.training, evaluate_every=1), save_every=2)
    monkeypatch.setattr(order, "PRESET", small)
    monkeypatch.setattr(order, "EVERY", 1)
    row = order.row_of("rope_free", 0, 4, tmp_path)
    saved = sorted(int(file.stem[4:]) for file in (tmp_path / "rope_free_lam0.0_seed0").glob("step*"))
    assert saved == [0, 2, 4, 5, 6]
    assert (row["last_step"], row["window_from"]) == (6, 4)
    assert np.isnan(row["formed_loss"])
    history = tls.head_history(
        order.saved_checkpoints(tmp_path / "rope_free_lam0.0_seed0", "rope_free, seed 0"), max_se=None
    )
    track = history.track()
    assert row["head"] == track["name"].iloc[-1]
    held = track["rope_imag_frac_pct"] >= 0.9
    expected = track.loc[held[::-1].cummin()[::-1], "step"].min()
    np.testing.assert_equal(float(row["phase_from"]), float(expected))
    # A finished run is not trained again: with all rows stored, none is made.
    output = tmp_path / "order.csv"
    rows().to_csv(output, index=False)
    monkeypatch.setattr(order, "row_of", None)
    app = order.typer.Typer()
    app.command()(order.main)
    command = [str(tmp_path), "--output", str(output), "--figure", str(tmp_path / "order.png")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "15 of 15 runs" in done.output
    assert (tmp_path / "order.png").stat().st_size > 10_000
    monkeypatch.setattr(order, "row_of", lambda arm, seed, start, work: {**rows().iloc[0], "arm": arm, "seed": seed})
    rows().iloc[:-2].to_csv(output, index=False)
    assert CliRunner().invoke(app, command).exit_code == 0
    assert pd.read_csv(output)["arm"].tolist()[-2:] == ["rope_sym", "rope_imag"]
