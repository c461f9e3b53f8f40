"""One cell of constrained training: presets and arms, its tables, its penalty, and when it stops."""

import json
from dataclasses import replace

import pandas as pd
import pytest
from constrained_preset import TINY

from tlspectral.studies.common.saved_training import SavedTraining
from tlspectral.studies.fingerprint.constrained import ARMS, PRESETS, cell, phase_penalty, train_cell
from tlspectral.studies.fingerprint.constrained.presets import loss_threshold


def test_the_presets_are_what_they_say():
    paper, quick = PRESETS["paper"], PRESETS["quick"]
    assert loss_threshold(64) == pytest.approx(2.15444, abs=1e-5)  # FP's
    assert (paper.loss_threshold, quick.loss_threshold) == (loss_threshold(64), loss_threshold(32))
    assert (paper.training.steps, quick.training.steps) == (6000, 4000)
    assert paper.training.learning_rate_at(5999) == 1e-3  # no decay
    assert paper.training.learning_rate_at(50) == pytest.approx(2.5e-4)
    for preset in PRESETS.values():
        json.dumps(preset.settings())
        assert preset.config_of(ARMS["ape_free"]).positional_embedding_type == "standard"
        assert preset.training_of(3).seed == 3


def test_a_cell_holds_three_tables_and_its_model():
    run = train_cell(TINY, ARMS["rope_imag"], 1)
    assert run.evaluations["step"].tolist() == [0, 2, 4, 6]
    assert (len(run.heads), len(run.kernels)) == (4 * 4, 4 * 4 * 9)
    for table in run.tables().values():
        assert list(table)[:3] == ["arm", "seed", "step"]
        assert table["arm"].unique().tolist() == ["rope_imag"]
        assert table["seed"].unique().tolist() == [1]
    free = train_cell(TINY, ARMS["rope_free"], 1)
    # The penalty acts: measured, it falls by 3.5e-3 in six steps, and by 3e-4 without it.
    assert run.evaluations["penalty"].iloc[-1] < phase_penalty(free.model).item() - 2e-3
    assert free.evaluations["penalty"].isna().all()
    assert free.evaluations["ce_pred"].iloc[0] == run.evaluations["ce_pred"].iloc[0]


def test_a_cell_stops_some_steps_after_both_criteria_hold(monkeypatch):
    """The measures of an untrained model are replaced; the schedule of evaluations is the cell's own."""
    measured = cell.measure

    def pretend(losses, induction):
        remaining = iter(zip(losses, induction, strict=True))

        def fake(*arguments):
            found = measured(*arguments)
            loss, score = next(remaining)
            return replace(found, evaluation={**found.evaluation, "ce_pred": loss, "ind_best": score})

        return fake

    for losses, induction, steps in (
        ([3.0, 0.1, 0.1, 0.1], [0.9, 0.4, 0.9, 0.9], [0, 2, 4, 6]),  # both at 4
        ([3.0, 0.1, 3.0, 0.1], [0.1, 0.9, 0.1, 0.9], [0, 2, 4]),  # both at 2, whatever comes after
        ([3.0, 0.1, 0.1, 0.1], [0.1, 0.9, 0.9, 0.9], [0, 2, 4]),  # both from 2 on
        ([3.0, 3.0, 3.0, 3.0], [0.9] * 4, [0, 2, 4, 6]),
    ):
        monkeypatch.setattr(cell, "measure", pretend(losses, induction))
        assert train_cell(TINY, ARMS["ape_free"], 0).evaluations["step"].tolist() == steps
    monkeypatch.setattr(cell, "measure", pretend([0.1] * 4, [0.9] * 4))
    assert len(train_cell(replace(TINY, stop_after=None), ARMS["ape_free"], 0).evaluations) == 4


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["rope_imag", "ape_sym"])
def test_a_cell_on_another_device_holds_the_same_tables(arm, device, tmp_path):
    here = train_cell(TINY, ARMS[arm], 1).tables()
    saved = SavedTraining(tmp_path, {})
    train_cell(TINY, ARMS[arm], 1, saved=saved, until=3, device=device)
    there = train_cell(TINY, ARMS[arm], 1, saved=saved, device=device).tables()  # goes on from step 3
    for name, table in here.items():
        # Rounding of LAPACK by the alignment of memory: at most 2e-13 of a spectral column.
        pd.testing.assert_frame_equal(table, there[name], rtol=1e-9, atol=1e-9)
