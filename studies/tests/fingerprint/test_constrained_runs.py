"""Constrained training: a cell, a grid of cells and its command, what goes on where it was stopped, and the models."""

import inspect
import json
import shutil
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from constrained_preset import TINY
from tlspectral_studies.common.model import AttentionOnlyTransformer
from tlspectral_studies.common.saved_training import SavedTraining, read_tensors
from tlspectral_studies.common.trainer import begin_training, training_steps
from tlspectral_studies.fingerprint.constrained import (
    ARMS,
    PRESETS,
    Arm,
    cell,
    cell_checkpoints,
    cell_model,
    constrained_grid,
    phase_penalty,
    train_cell,
)
from tlspectral_studies.fingerprint.constrained.presets import loss_threshold
from tlspectral_studies.fingerprint.constrained.saved_cells import cell_name
from torch.nn.attention import SDPBackend, sdpa_kernel
from typer.testing import CliRunner
from zoo import generator

import tlspectral as tls
from tlspectral.algebra.nulls import one_thread
from tlspectral.cli import app
from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.tables import read_table

TABLES = ("evaluations", "heads", "kernels", "formation", "table4", "rerouting")
SAVING = replace(TINY, save_every=2, stop_after=None)
ARM_NAMES = ("rope_imag", "ape_sym")


# --- a cell ---


def test_the_presets_are_what_they_say():
    paper, quick = PRESETS["paper"], PRESETS["quick"]
    assert loss_threshold(64) == pytest.approx(2.15444, abs=1e-5)  # FP's
    assert (paper.loss_threshold, quick.loss_threshold) == (loss_threshold(64), loss_threshold(32))
    rates = [paper.training.learning_rate_at(step) for step in (50, 5999)]
    assert (paper.training.steps, rates) == (6000, pytest.approx([2.5e-4, 1e-3]))  # no decay
    assert paper.training_of(3).seed == 3
    json.dumps([preset.settings() for preset in PRESETS.values()])


@pytest.mark.slow
def test_a_cell_holds_three_tables_and_its_model():
    run = train_cell(TINY, ARMS["rope_imag"], 1)
    assert run.tables["evaluations"]["step"].tolist() == [0, 2, 4, 6]
    assert (len(run.tables["heads"]), len(run.tables["kernels"])) == (4 * 4, 4 * 4 * 9)
    for table in run.tables.values():
        assert table[["arm", "seed"]].drop_duplicates().to_numpy().tolist() == [["rope_imag", 1]]
    free = train_cell(TINY, ARMS["rope_free"], 1)
    # The penalty acts: measured, it falls by 3.5e-3 in six steps, and by 3e-4 without it.
    assert run.tables["evaluations"]["penalty"].iloc[-1] < phase_penalty(free.model).item() - 2e-3
    assert free.tables["evaluations"]["penalty"].isna().all()
    assert free.tables["evaluations"]["ce_pred"].iloc[0] == run.tables["evaluations"]["ce_pred"].iloc[0]


@pytest.mark.slow
def test_a_cell_stops_some_steps_after_both_criteria_hold(monkeypatch):
    """The measures of an untrained model are replaced; the schedule of evaluations is the cell's own."""
    measured = cell.measure

    def steps(losses, induction, preset=TINY):
        remaining = iter(zip(losses, induction, strict=True))

        def pretended(*arguments):
            found = measured(*arguments)
            loss, score = next(remaining)
            return {**found, "evaluations": [{**found["evaluations"][0], "ce_pred": loss, "ind_best": score}]}

        monkeypatch.setattr(cell, "measure", pretended)
        return train_cell(preset, ARMS["ape_free"], 0).tables["evaluations"]["step"].tolist()

    assert steps([3.0, 0.1, 0.1, 0.1], [0.9, 0.4, 0.9, 0.9]) == [0, 2, 4, 6]  # both at 4
    assert steps([3.0, 0.1, 3.0, 0.1], [0.1, 0.9, 0.1, 0.9]) == [0, 2, 4]  # both at 2, whatever comes after
    assert steps([3.0] * 4, [0.9] * 4) == [0, 2, 4, 6]
    assert steps([0.1] * 4, [0.9] * 4, replace(TINY, stop_after=None)) == [0, 2, 4, 6]


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["rope_imag", "ape_sym"])
def test_a_cell_on_another_device_holds_the_same_tables(arm, device, tmp_path):
    saved = SavedTraining(tmp_path, {})
    with sdpa_kernel(SDPBackend.MATH):  # each device has kernels of its own, which round otherwise
        here = train_cell(TINY, ARMS[arm], 1).tables
        train_cell(TINY, ARMS[arm], 1, saved=saved, until=3, device=device)
        there = train_cell(TINY, ARMS[arm], 1, saved=saved, device=device).tables  # goes on from step 3
    for name, table in here.items():
        # Rounding of LAPACK by the alignment of memory: at most 2e-13 of a spectral column.
        pd.testing.assert_frame_equal(table, there[name], rtol=1e-9, atol=1e-9)


def test_a_penalty_that_ends_is_that_of_the_banned_arm_and_then_none():
    """Weights after steps 2 and 4 of a penalty until step 2, against both trainings by hand."""
    ends = replace(ARMS["rope_imag"], name="rope_ends", penalty_until=2)
    with one_thread():
        found = train_cell(replace(SAVING, stop_after=2), ends, 1, until=4)
        settings = SAVING.training_of(1)
        training = begin_training(SAVING.config_of(ends), settings)
        for weight, done, last in ((ends.penalty_weight, 0, 2), (0.0, 2, 4)):
            steps = training_steps(
                training, SAVING.task, settings, done=done, penalty=phase_penalty, penalty_weight=weight
            )
            next(step for step in steps if step == last)
        expected = training.model.state_dict()
        throughout = train_cell(SAVING, ARMS["rope_imag"], 1, until=4).model.state_dict()
    state = found.model.state_dict()
    for name in state:
        # A weight of 0 adds gradients that are 0: measured, equal to the bit.
        torch.testing.assert_close(state[name], expected[name], atol=0, rtol=0)
    # Measured: 3e-3 between two steps of the penalty and four.
    assert (state["blocks.0.attn.W_Q"] - throughout["blocks.0.attn.W_Q"]).abs().max() > 1e-3
    # The penalty is measured beyond its end.
    assert found.tables["evaluations"]["penalty"].notna().all()


def half_the_queries(built):
    built.layers[0].attn.W_Q *= 0.5


def test_an_arm_changes_the_initial_weights_once(tmp_path):
    mine = Arm("rope_halved", "rotary", initial_weights=half_the_queries)
    start = train_cell(SAVING, mine, 3, until=0).model.state_dict()
    plain = AttentionOnlyTransformer(SAVING.config_of(mine), seed=3).state_dict()
    assert torch.equal(start.pop("blocks.0.attn.W_Q"), 0.5 * plain.pop("blocks.0.attn.W_Q"))
    assert all(torch.equal(value, start[name]) for name, value in plain.items())
    # A cell that goes on from a saved step is not changed again.
    with one_thread():
        whole = train_cell(SAVING, mine, 3)
        saved = SavedTraining(tmp_path, {})
        train_cell(SAVING, mine, 3, saved=saved, until=2)
        stopped = train_cell(SAVING, mine, 3, saved=saved)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, stopped.model.state_dict()[name]), name


def arm_of(**given):
    """An arm of a user, whose annotations are not checked."""
    made = object.__new__(Arm)
    inspect.unwrap(Arm.__init__)(made, "mine", "rotary", **given)
    return made


def test_arms_are_recorded_as_json_and_refused_where_they_contradict_themselves():
    free = {"positional_embedding_type": "standard", "penalty": None, "penalty_weight": 0.0}
    assert ARMS["ape_free"].settings() == free  # as in stored tables
    ends = replace(ARMS["rope_imag"], name="rope_ends", penalty_until=300, initial_weights=half_the_queries)
    assert json.loads(json.dumps(ends.settings())) == {
        **ARMS["rope_imag"].settings(),
        "penalty_until": 300,
        "initial_weights": "half_the_queries",
    }
    bound = replace(ends, penalty=partial(phase_penalty, 2.0, name="x", other=phase_penalty))
    assert bound.settings()["penalty"] == "phase_penalty(2.0, name='x', other=function)"  # no address in memory
    assert cell_name(ends, 2) == "rope_ends_lam10.0_until300_seed2"
    assert cell_name(ARMS["rope_imag"], 2) == "rope_imag_lam10.0_seed2"  # as in folders made before
    given = {"penalty": phase_penalty, "penalty_weight": 1.0}
    for wrong in ({"penalty_until": 300}, *({**given, "penalty_until": until} for until in (0, 2.5, np.nan, "2"))):
        with pytest.raises(ValueError, match="has penalty_until="):
            arm_of(**wrong)
    for weight in (np.nan, np.inf, "10"):
        with pytest.raises(ValueError, match=r"has penalty_weight=.*finite number"):
            arm_of(penalty=phase_penalty, penalty_weight=weight)
    of_numpy = arm_of(penalty=phase_penalty, penalty_weight=np.float32(0.5), penalty_until=np.int64(3))
    assert json.loads(json.dumps(of_numpy.made_with()))["penalty_until"] == 3
    assert of_numpy == Arm("mine", "rotary", phase_penalty, 0.5, 3)


@pytest.mark.slow
def test_a_grid_holds_an_arm_whose_penalty_ends(tmp_path):
    ends = replace(ARMS["rope_imag"], name="rope_ends", penalty_until=2, initial_weights=half_the_queries)
    tables = finish(tmp_path, arms=[ends, "rope_imag"])
    assert tables["heads"].attrs["arms"] == {"rope_ends": ends.settings(), "rope_imag": ARMS["rope_imag"].settings()}
    kept = cell_model(tmp_path, "rope_ends", step=0).layers[0].attn
    plain = AttentionOnlyTransformer(SAVING.config_of(ends), seed=0).layers[0].attn
    assert torch.equal(kept.W_Q, 0.5 * plain.W_Q)
    assert [step for step, _ in cell_checkpoints(tmp_path, "rope_ends")] == [0, 2, 4, 6]


@pytest.mark.slow
def test_a_cell_of_another_arm_with_its_name_is_refused(tmp_path):
    def small(built, *, scale=1.0):
        return scale * built.layers[0].attn.W_V.square().sum()

    first = small
    mine = Arm("mine", "rotary", small, 0.1)
    finish(tmp_path, arms=[mine])
    again = finish(tmp_path, arms=[Arm("mine", "rotary", small, 0.1)])
    assert again["heads"].attrs["arms"]["mine"]["penalty"] == "small"

    def small(built, *, scale=1.0):
        return scale * built.layers[0].attn.W_O.square().sum()

    for other in (
        Arm("mine", "rotary", small, 0.1),  # another function of the same name
        Arm("mine", "standard", first, 0.1),
        replace(mine, initial_weights=half_the_queries),
        replace(mine, penalty=partial(first, scale=2.0)),
    ):
        with pytest.raises(IncompatibleCheckpoint, match="another training"):
            finish(tmp_path, arms=[other])
    assert len(list((tmp_path / "cells").glob("*.parquet"))) == 1
    bound = Arm("bound", "rotary", partial(first, scale=2.0), 0.1)
    assert finish(tmp_path, arms=[bound])["heads"].attrs["arms"]["bound"]["penalty"] == "small(scale=2.0)"
    finish(tmp_path, arms=[replace(bound, penalty=partial(first, scale=2.0))])


# --- a grid ---


def same_tables(found, expected):
    for name in TABLES:
        pd.testing.assert_frame_equal(found[name], expected[name])
        assert found[name].attrs == expected[name].attrs


@pytest.mark.slow
def test_a_grid_writes_what_it_returns(tiny_grid):
    folder, returned = tiny_grid
    assert tuple(returned) == TABLES
    same_tables({name: read_table(folder / f"{name}.parquet") for name in TABLES}, returned)
    cells = returned["evaluations"][["arm", "seed"]].drop_duplicates()
    assert cells.to_numpy().tolist() == [[arm, seed] for arm in ARMS for seed in (0, 1)]
    heads = returned["heads"]
    assert (heads["name"] == "L" + heads["layer"].astype(str) + "H" + heads["head"].astype(str)).all()
    mine = heads[(heads["arm"] == "rope_sym") & (heads["seed"] == 1)].drop(columns="name").reset_index(drop=True)
    # Here on more than one thread.
    pd.testing.assert_frame_equal(mine, train_cell(TINY, ARMS["rope_sym"], 1).tables["heads"], rtol=1e-5, atol=1e-7)
    assert heads.loc[heads["arm"] == "ape_free", "rope_imag_frac"].isna().all()
    assert returned["formation"]["formed_both"].isna().all()
    assert (returned["table4"]["not_formed_slower"] == 2).all()
    assert heads.attrs["preset"]["loss_threshold"] == TINY.loss_threshold
    penalty = {"positional_embedding_type": "rotary", "penalty": "phase_penalty", "penalty_weight": 10.0}
    assert heads.attrs["arms"]["rope_imag"] == penalty


@pytest.mark.slow
def test_arms_and_seeds_are_added_to_a_grid_of_one_seed(tmp_path, tiny_grid):
    tables = constrained_grid(tmp_path, TINY, arms=["rope_free", "ape_free"], seeds=[1])
    expected = tiny_grid[1]["kernels"]
    one = expected[(expected["seed"] == 1) & expected["arm"].isin(["rope_free", "ape_free"])]
    # Arms stand in the order in which they were given.
    one = one.sort_values("arm", ascending=False, kind="stable", ignore_index=True)
    pd.testing.assert_frame_equal(tables["kernels"], one)
    assert (tables["table4"]["verdict"] == "one seed").all()
    assert tables["rerouting"][["kernel_distance", "free_spread", "distance_ratio"]].isna().all(axis=None)
    mine = Arm("rope_mine", "rotary", lambda built: built.layers[0].attn.W_V.square().sum(), 0.1)
    more = constrained_grid(tmp_path, TINY, arms=["rope_free", mine], seeds=2)
    assert more["formation"]["arm"].value_counts().to_dict() == {"rope_free": 2, "rope_mine": 2}
    assert more["table4"].empty
    assert more["heads"].attrs["arms"]["rope_mine"]["penalty"] == "<lambda>"
    pd.testing.assert_frame_equal(
        more["kernels"].query("arm == 'rope_free'").reset_index(drop=True),
        expected.query("arm == 'rope_free'").reset_index(drop=True),
    )


@pytest.mark.slow
def test_workers_give_the_same_tables(tiny_grid, tmp_path):
    same_tables(constrained_grid(tmp_path, TINY, seeds=2, n_jobs=2), tiny_grid[1])


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "quick", TINY)
    command = ["study", "constrained", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, [*command, "--arms", "ape_free, ape_sym", "--seeds", "2"])
    assert done.exit_code == 0, done.output
    assert "evaluations.parquet: 16 rows" in done.output.replace("\n", "")
    assert "falsified" in done.output
    written = read_table(tmp_path / "table4.parquet").attrs["command"]
    assert written == "tlspectral study constrained --preset quick --arms ape_free, ape_sym --seeds 2"
    one = CliRunner().invoke(app, [*command, "--arms", "ape_free", "--seeds", "1", "--until", "4"])
    assert "One seed: contrasts and spreads are over seeds, and are NaN" in one.output
    assert read_table(tmp_path / "formation.parquet").attrs["command"].endswith("--seeds 1 --until 4")
    wrong = CliRunner().invoke(app, [*command, "--arms", "ape_fre"])
    assert wrong.exit_code == 2
    assert "is no arm" in wrong.output


# --- stopped anywhere ---


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
        for step in (0, 2, 4, 6):
            found, expected = (cell_model(place, arm, step=step).state_dict() for place in (folder, whole[0]))
            assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_grid_that_was_stopped_inside_a_cell_goes_on_there(whole, tmp_path, monkeypatch):
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
    assert sorted(file.stem for file in stopped.iterdir()) == ["state", "step0", "step2"]
    left[0] = 2  # what is left: steps 4 and 6, and nothing of the first cell
    same_as(whole, tmp_path, finish(tmp_path))
    assert left[0] == 0


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("arm", "adjacent"), [("rope_imag", True), ("ape_sym", False)])
def test_a_cell_gives_its_model_back(tmp_path, arm, adjacent):
    preset = replace(SAVING, config=replace(SAVING.config, rotary_adjacent_pairs=adjacent, unembed_bias=not adjacent))
    finish(tmp_path, preset, arms=[arm])
    with one_thread():
        run = train_cell(preset, ARMS[arm], 0)
    kept = cell_model(tmp_path, arm)
    assert all(torch.equal(value, kept.state_dict()[name]) for name, value in run.model.state_dict().items())
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
    tokens = preset.task.sample(5, generator(1)).tokens
    with torch.no_grad():
        # Measured: 7e-7 in logits of up to 2.4; the weights of two steps earlier are off by 0.3.
        torch.testing.assert_close(kept.to_model()(tokens), run.model(tokens), atol=5e-6, rtol=0)
        assert (cell_model(tmp_path, arm, step=4)(tokens) - run.model(tokens)).abs().max() > 0.1


@pytest.mark.slow
def test_a_history_of_a_cell(whole):
    folder, tables = whole
    history = tls.head_history(cell_checkpoints(folder, "rope_imag"), null_draws=2)
    assert history.steps == [0, 2, 4, 6]
    for name in ("dir_frac", "D_head", "rope_imag_frac"):
        expected = tables["heads"].query("arm == 'rope_imag'")[name]
        np.testing.assert_allclose(history.heads[name], expected, atol=1e-9, rtol=0)
    assert history.heads.attrs["model"] == "rope_imag, seed 0"
    sources = [source["revision"] for source in history.heads.attrs["checkpoints"]]
    assert sources == ["step0", "step2", "step4", "step6"]
