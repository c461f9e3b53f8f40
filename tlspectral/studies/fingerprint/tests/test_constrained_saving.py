"""Cells of constrained training that are stopped anywhere and go on, and the models that they give back."""

import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from constrained_preset import TINY, generator

import tlspectral as tls
from tlspectral.nulls import one_thread
from tlspectral.studies.common.saved_training import read_tensors
from tlspectral.studies.fingerprint.constrained import (
    ARMS,
    cell,
    cell_checkpoints,
    cell_model,
    constrained_grid,
    train_cell,
)
from tlspectral.studies.fingerprint.constrained.saved_cells import cell_name
from tlspectral.tables import read_table

SAVING = replace(TINY, save_every=2, stop_after=None)
ARM_NAMES = ("rope_imag", "ape_sym")
TABLES = ("evaluations", "heads", "kernels", "formation", "table4", "rerouting")


def finish(folder, preset=SAVING, **options):
    return constrained_grid(folder, preset, **{"arms": ARM_NAMES, "seeds": 1, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A grid that was not stopped. Not to be changed."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, finish(folder)


def same_as(whole, folder, tables):
    """Compare tables and weights to the bit."""
    for name in TABLES:
        pd.testing.assert_frame_equal(tables[name], whole[1][name], check_exact=True)
        pd.testing.assert_frame_equal(read_table(folder / f"{name}.parquet"), whole[1][name], check_exact=True)
    for arm in ARM_NAMES:
        steps, expected = (dict(cell_checkpoints(place, arm)) for place in (folder, whole[0]))
        for step in (0, 2, 4, 6):
            assert steps[step].identity() == expected[step].identity()


def test_a_cell_that_raised_goes_on_inside(whole, tmp_path, monkeypatch):
    measured, left = cell.measure, [6]

    def some(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return measured(*arguments)

    monkeypatch.setattr(cell, "measure", some)
    with pytest.raises(KeyboardInterrupt):  # at step 4 of the second cell
        finish(tmp_path)
    stopped = tmp_path / "cells" / cell_name(ARMS["ape_sym"], 0)
    assert sorted(file.name for file in stopped.iterdir()) == [
        "state.safetensors", "step0.safetensors", "step2.safetensors",
    ]  # fmt: skip
    left[0] = 2  # what is left: steps 4 and 6
    same_as(whole, tmp_path, finish(tmp_path))
    assert left[0] == 0


def test_a_cell_that_another_job_finishes_meanwhile_stays_finished(whole, tmp_path, monkeypatch):
    measured, calls = cell.measure, []

    def other_finishes(*arguments):
        calls.append(1)
        if len(calls) == 2:  # before step 2 is saved
            finish(tmp_path)
        return measured(*arguments)

    monkeypatch.setattr(cell, "measure", other_finishes)
    finish(tmp_path, until=4)
    _, facts = read_tensors(tmp_path / "cells" / cell_name(ARMS["rope_imag"], 0) / "state.safetensors")
    assert facts["step"] == 6
    same_as(whole, tmp_path, finish(tmp_path))


def test_rounds_give_the_same_tables(whole, tmp_path):
    for until, last in ((1, 0), (4, 4), (2, 4)):  # the last one is behind what there is
        tables = finish(tmp_path, until=until)
        assert (tables["formation"]["last_step"] == last).all()
        # Another rhythm of saving changes no number.
        assert finish(tmp_path, replace(SAVING, save_every=5), until=until)["heads"].equals(tables["heads"])
        assert not list((tmp_path / "cells").glob("*.parquet"))
        expected = whole[1]["heads"]
        pd.testing.assert_frame_equal(
            tables["heads"], expected[expected["step"] <= last].reset_index(drop=True), check_exact=True
        )
    same_as(whole, tmp_path, finish(tmp_path, until=6))
    tables = finish(tmp_path, until=2)  # finished cells stay as they are
    pd.testing.assert_frame_equal(tables["kernels"], whole[1]["kernels"], check_exact=True)
    # Contrasts of unfinished cells are open.
    more = {"arms": ["rope_imag", "rope_free"], "seeds": 1}
    assert finish(tmp_path, until=4, **more)["formation"]["last_step"].tolist() == [6, 4]
    assert finish(tmp_path, until=4, **more)["table4"]["verdict"].tolist() == ["open"] * 2


# --- the models ---


@pytest.mark.parametrize(("arm", "adjacent"), [("rope_imag", True), ("ape_sym", False)])
def test_a_cell_gives_its_model_back(tmp_path, arm, adjacent):
    preset = replace(SAVING, config=replace(SAVING.config, rotary_adjacent_pairs=adjacent, unembed_bias=not adjacent))
    finish(tmp_path, preset, arms=[arm])
    with one_thread():
        run = train_cell(preset, ARMS[arm], 0)
    kept = cell_model(tmp_path, arm)
    assert all(torch.equal(value, kept.state_dict()[name]) for name, value in run.model.state_dict().items())
    tokens = preset.task.sample(5, generator(1)).tokens
    for step, arm_name, said in (
        (3, arm, "has no weights of step 3; it has 0, 2, 4, 6"),
        (None, "rope_free", f"no saved weights of arm rope_free, .* those of {arm}_lam10"),
    ):
        with pytest.raises(ValueError, match=said):
            cell_model(tmp_path, arm_name, step=step)
    folder = tmp_path / "cells" / cell_name(ARMS[arm], 0)
    shutil.copytree(folder, folder.with_name(f"{arm}_lam1.0_seed0"))
    with pytest.raises(ValueError, match="with several weights of its penalty"):
        cell_model(tmp_path, arm)
    shutil.rmtree(folder.with_name(f"{arm}_lam1.0_seed0"))
    with torch.no_grad():
        # Measured: 7e-7 in logits of up to 2.4; the weights of two steps earlier are off by 0.3.
        torch.testing.assert_close(kept.to_model()(tokens), run.model(tokens), atol=5e-6, rtol=0)
        assert (cell_model(tmp_path, arm, step=4)(tokens) - run.model(tokens)).abs().max() > 0.1


def test_a_history_of_a_cell(whole):
    folder, tables = whole
    history = tls.head_history(cell_checkpoints(folder, "rope_imag"), null_draws=2)
    assert history.steps == [0, 2, 4, 6]
    for name in ("dir_frac", "D_head", "rope_imag_frac"):
        expected = tables["heads"].query("arm == 'rope_imag'")[name]
        np.testing.assert_allclose(history.heads[name], expected, atol=1e-9, rtol=0)
    assert history.heads.attrs["model"] == "rope_imag, seed 0"
    sources = history.heads.attrs["checkpoints"]
    assert [source["revision"] for source in sources] == ["step0", "step2", "step4", "step6"]
