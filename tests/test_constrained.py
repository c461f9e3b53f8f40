"""The grid of constrained training: formation times, contrasts, kernels; cells that are stopped and continued."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from tlspectral.errors import IncompatibleCheckpoint
from tlspectral.plots.formation import formation as formation_figure
from tlspectral.tables import read_table
from tlspectral.training import RandomMapTask, TrainingSettings, TransformerConfig
from tlspectral.training.constrained import (
    ARMS,
    PRESETS,
    Arm,
    Preset,
    constrained_grid,
    formation,
    formation_tests,
    grid,
    phase_penalty,
    previous_token_heads,
    rerouting,
    symmetric_penalty,
    train_cell,
)
from tlspectral.training.constrained import __main__ as command
from tlspectral.training.constrained.presets import loss_threshold

TINY = Preset(
    "tiny",
    TransformerConfig(d_model=16, n_heads=2, d_head=8, d_vocab=8, n_ctx=16),
    RandomMapTask(vocabulary=8, length=16),
    TrainingSettings(steps=6, batch_size=4, warmup_steps=2, decay_share=0.0, evaluate_every=2, evaluation_sequences=8),
    stop_after=2,
)
TABLES = ("evaluations", "heads", "kernels", "formation", "table4", "rerouting")
TWO = ("ape_free", "ape_sym")


# --- presets ---


def test_the_presets_are_what_they_say():
    paper, quick = PRESETS["paper"], PRESETS["quick"]
    assert loss_threshold(64) == pytest.approx(2.15444, abs=1e-5)  # FP's
    assert paper.loss_threshold == loss_threshold(64)
    assert quick.loss_threshold == loss_threshold(32)
    sizes = ("d_model", "n_heads", "d_head", "d_vocab", "n_ctx", "rotary_adjacent_pairs", "unembed_bias")
    assert [getattr(paper.config, name) for name in sizes] == [128, 4, 32, 64, 256, False, True]
    assert paper.training.learning_rate_at(5999) == 1e-3  # no decay
    assert paper.training.learning_rate_at(50) == pytest.approx(2.5e-4)
    schedule = ("steps", "batch_size", "evaluate_every", "evaluation_sequences", "weight_decay", "clip")
    assert [getattr(paper.training, name) for name in schedule] == [6000, 64, 100, 64, 0.01, 1.0]
    assert [getattr(quick.training, name) for name in schedule] == [4000, 32, 25, 64, 0.01, 1.0]
    assert (paper.stop_after, quick.stop_after) == (None, 200)
    assert {name: arm.penalty_weight for name, arm in ARMS.items()} == {
        "ape_free": 0.0,
        "ape_sym": 10.0,
        "rope_free": 0.0,
        "rope_sym": 10.0,
        "rope_imag": 10.0,
    }
    for preset in PRESETS.values():
        json.dumps(preset.settings())
        assert preset.config_of(ARMS["ape_free"]).positional_embedding_type == "standard"
        assert preset.training_of(3).seed == 3


@pytest.mark.parametrize("given", [{"penalty": symmetric_penalty}, {"penalty_weight": 1.0}])
def test_half_a_constraint_is_refused(given):
    with pytest.raises(ValueError, match="give both, or neither"):
        Arm("mine", "rotary", **given)


# --- formation ---


def evaluations(arm, seed, losses, induction, every=25):
    steps = every * np.arange(len(losses))
    return pd.DataFrame({"arm": arm, "seed": seed, "step": steps, "ce_pred": losses, "ind_best": induction})


def test_formation_is_the_first_evaluation_that_meets_the_criteria():
    threshold = loss_threshold(32)  # 1.808
    table = pd.concat(
        [
            evaluations("a", 0, [3.5, 2.0, 1.5, 1.9, 0.3], [0.1, 0.9, 0.2, 0.9, 0.9]),
            evaluations("a", 1, [3.5, 1.0, 0.5, 0.5, 0.5], [0.1, 0.6, 0.9, 0.9, 0.9]),
            evaluations("b", 0, [3.5, 3.0, 1.7, 1.7, 1.7], [0.1, 0.1, 0.1, 0.2, 0.5]),
            evaluations("b", 1, [3.5, 3.0, 2.0, 1.81, 1.809], [0.9] * 5),
        ]
    )
    found = formation(table.sample(frac=1, random_state=0).sort_values(["arm", "seed"]), vocabulary=32)
    assert found[["arm", "seed"]].values.tolist() == [["a", 0], ["a", 1], ["b", 0], ["b", 1]]
    np.testing.assert_array_equal(found["formed_loss"], [50, 25, 50, np.nan])
    np.testing.assert_array_equal(found["formed_both"], [100, 25, np.nan, np.nan])
    np.testing.assert_array_equal(found["ind_at_formed_loss"], [0.2, 0.6, 0.1, np.nan])
    assert found["last_step"].tolist() == [100] * 4
    crossing = [25 + 25 * (2.0 - threshold) / 0.5, 25 * (3.5 - threshold) / 2.5, 25 + 25 * (3.0 - threshold) / 1.3]
    np.testing.assert_allclose(found["crossing_loss"], [*crossing, np.nan])


def test_a_run_below_the_threshold_from_the_start():
    found = formation(evaluations("a", 0, [0.1, 0.1], [0.9, 0.9]), vocabulary=32).iloc[0]
    assert (found["formed_loss"], found["formed_both"], found["crossing_loss"]) == (0, 0, 0)


def test_formation_of_other_tables_is_refused():
    table = evaluations("a", 0, [1.0], [0.9])
    with pytest.raises(ValueError, match="evaluations has no column ce_pred, ind_best"):
        formation(table.drop(columns=["ce_pred", "ind_best"]), vocabulary=32)
    with pytest.raises(ValueError, match="evaluations has no rows"):
        formation(table.iloc[:0], vocabulary=32)
    with pytest.raises(ValueError, match=r"arm a, seed 0 has several rows for one step \(step 0\): choose one run"):
        formation(pd.concat([table, table.assign(strength=1.0)], ignore_index=True), vocabulary=32)


# --- contrasts ---

# "Fingerprint, Not Blueprint", section 10: first evaluation with `ce_pred` below 2.154 of the released runs.
PUBLISHED = {
    "ape_free": [600, 600, 600, 600, 600],
    "ape_sym": [1400, 1600, 1800, 1900, 2000],
    "rope_free": [1000, 900, 1000, 900, 900],
    "rope_sym": [1400, 1400, 1800, 1600, 1600],
    "rope_imag": [1300, 1400, 1300, 1000, 1400],
}


def formed(steps, last_step=6000):
    rows = [
        {"arm": arm, "seed": seed, "formed_loss": step, "formed_both": step, "last_step": last_step}
        for arm, found in steps.items()
        for seed, step in enumerate(found)
    ]
    return pd.DataFrame(rows)


def test_the_papers_table_4():
    table = formation_tests(formed(PUBLISHED))
    assert table["criterion"].tolist() == ["both"] * 4 + ["loss"] * 4
    table = table[table["criterion"] == "loss"].set_index("prediction")
    assert list(table.index) == ["P1", "P3", "P4", "P2"]
    assert table["hodges_lehmann"].tolist() == [300, 1200, 600, 400]
    assert table["rank_biserial"].tolist() == pytest.approx([1, 1, 1, 0.92])
    assert table["ratio"].round(2).tolist() == [1.57, 2.90, 1.66, 1.36]
    assert table["mean_slower"].tolist() == [940, 1740, 1560, 1280]
    assert table["sd_slower"].round().tolist() == [55, 241, 167, 164]
    # As published: exact without regard to ties, no cumulative minimum.
    assert table["pvalue_paper"].round(4).tolist() == [0.0040, 0.0040, 0.0040, 0.0079]
    assert table["q_paper"].round(3).tolist() == [0.016, 0.008, 0.005, 0.008]
    # With ties counted and the adjustment done to the end.
    assert table["pvalue"].tolist() == pytest.approx([1 / 252] * 3 + [3 / 252])
    assert table["q"].tolist() == pytest.approx([4 / 3 / 252] * 3 + [3 / 252])
    assert table["verdict"].tolist() == ["holds", "falsified", "falsified", "falsified"]


def test_verdicts_follow_the_numbers():
    same = {arm: [600, 700, 800, 900, 1000] for arm in PUBLISHED}
    verdicts = formation_tests(formed(same)).set_index("prediction")["verdict"]
    assert verdicts["P1"].tolist() == ["not shown"] * 2
    assert verdicts["P3"].tolist() == verdicts["P4"].tolist() == ["not falsified"] * 2
    faster = formation_tests(formed({**PUBLISHED, "ape_sym": [100, 200, 300, 400, 500]})).set_index("prediction")
    assert (faster.loc["P3", "verdict"] == "not falsified").all()
    assert (faster.loc["P3", "rank_biserial"] == -1).all()
    for never, verdict in ((5, "holds"), (2, "some formed")):
        runs = {**PUBLISHED, "rope_imag": [np.nan] * never + [1300] * (5 - never)}
        row = formation_tests(formed(runs)).set_index("prediction").loc["P2"].iloc[0]
        assert (row["verdict"], row["not_formed_slower"], row["n_slower"]) == (verdict, never, 5)
        assert row["mean_slower"] == np.mean([6000] * never + [1300] * (5 - never))
        assert row["pvalue"] == pytest.approx(1 / 252)


def test_each_criterion_is_tested_on_its_own():
    runs = formed(PUBLISHED)
    runs.loc[runs["arm"] == "rope_imag", "formed_both"] = np.nan
    table = formation_tests(runs).set_index(["criterion", "prediction"])
    assert table.loc[("both", "P2"), "verdict"] == "holds"
    assert table.loc[("loss", "P2"), "verdict"] == "falsified"
    assert table.loc[("both", "P2"), "not_formed_slower"] == 5


def test_contrasts_of_the_arms_that_are_there():
    some = formation_tests(formed({name: PUBLISHED[name] for name in ("rope_free", "rope_sym", "ape_free")}))
    assert some["prediction"].tolist() == ["P1", "P4"] * 2
    none = formation_tests(formed({"ape_free": [1, 2], "mine": [3, 4]}))
    assert none.empty
    assert list(none) == list(some)


def test_one_seed_is_too_few():
    with pytest.raises(ValueError, match=r"P3 compares ape_sym with ape_free over seeds, and ape_sym has 1: two"):
        formation_tests(formed({"ape_free": [600, 600], "ape_sym": [1400]}))
    with pytest.raises(ValueError, match="formation has no column formed_loss"):
        formation_tests(formed(PUBLISHED).drop(columns="formed_loss"))


# --- kernels ---


def run_tables(arm, seed, best, curves, step=10):
    """Heads and kernels of a run of one layer: `prev` is largest at head `best`, `curves` by head."""
    heads = pd.DataFrame(
        {
            "arm": arm,
            "seed": seed,
            "step": [step - 5] * len(curves) + [step] * len(curves),
            "layer": 0,
            "head": [*range(len(curves))] * 2,
            # At the earlier evaluation another head is the best, and better.
            "prev": [0.99 if head != best else 0.1 for head in range(len(curves))]
            + [0.8 if head == best else 0.2 for head in range(len(curves))],
            "dir_frac": [0.0] * len(curves) + [0.1 * head for head in range(len(curves))],
        }
    )
    kernels = pd.DataFrame(
        [
            {"arm": arm, "seed": seed, "step": at, "layer": 0, "head": head, "offset": offset - 8, "score": score}
            for at in (step - 5, step)
            for head, curve in enumerate(curves)
            for offset, score in enumerate(curve)
        ]
    )
    return heads, kernels


def joined(*runs):
    return tuple(pd.concat(parts, ignore_index=True) for parts in zip(*runs, strict=True))


def spike(offset, height=1.0, level=0.0):
    curve = np.full(9, level)
    curve[offset + 8] += height
    return curve


def test_kernels_of_the_final_previous_token_head():
    heads, kernels = joined(
        run_tables("rope_free", 0, 1, [spike(0), spike(-1)]),
        run_tables("rope_free", 1, 0, [spike(-1, 2.0, level=7.0), spike(0)]),
        run_tables("rope_free", 2, 0, [spike(-1, 4.0), spike(0)], step=20),
        run_tables("rope_imag", 0, 1, [spike(0), spike(-3, 1.0)]),
        run_tables("ape_free", 0, 1, [spike(0), spike(-2)]),
    )
    table = rerouting(heads, kernels.sample(frac=1, random_state=1)).set_index(["arm", "seed"])
    assert table["head"].tolist() == [1, 0, 0, 1, 1]
    assert table["step"].tolist() == [10, 10, 20, 10, 10]
    assert table["peak_offset"].tolist() == [-1, -1, -1, -3, -2]
    assert table.loc[("rope_imag", 0), "dir_frac"] == pytest.approx(0.1)

    def rms(one, other):
        one, other = one - one.mean(), other - other.mean()
        return np.sqrt(((one - other) ** 2).mean())

    # The level of a kernel does not matter.
    free = [spike(-1, height) for height in (1.0, 2.0, 4.0)]
    among = [np.mean([rms(free[i], free[j]) for j in range(3) if j != i]) for i in range(3)]
    assert table.loc["rope_free", "kernel_distance"].tolist() == pytest.approx(among)
    own = np.mean([rms(spike(-3), curve) for curve in free])
    row = table.loc[("rope_imag", 0)]
    assert row["kernel_distance"] == pytest.approx(own)
    assert row["free_spread"] == pytest.approx(np.mean(among))
    assert row["distance_ratio"] == pytest.approx(own / np.mean(among))
    assert np.isnan(table.loc[("ape_free", 0), ["kernel_distance", "free_spread"]].astype(float)).all()


def test_kernels_that_do_not_fit_are_refused():
    heads, kernels = run_tables("rope_free", 0, 1, [spike(0), spike(-1)])
    with pytest.raises(ValueError, match="arm rope_free, seed 0: the table of kernels has none of L0H1 at step 10"):
        rerouting(heads, kernels[kernels["head"] == 0])
    with pytest.raises(ValueError, match="no rows"):
        previous_token_heads(heads.iloc[:0])
    with pytest.raises(ValueError, match="seed 0 has several rows for one step, layer, head"):
        previous_token_heads(pd.concat([heads, heads], ignore_index=True))
    with pytest.raises(ValueError, match="seed 0 has several rows for one step, layer, head, offset"):
        rerouting(heads, pd.concat([kernels, kernels], ignore_index=True))


# --- cells ---


def test_a_cell_holds_three_tables_and_its_model():
    cell = train_cell(TINY, ARMS["rope_imag"], 1)
    assert cell.evaluations["step"].tolist() == [0, 2, 4, 6]
    assert list(cell.evaluations) == [
        "arm", "seed", "step", "loss", "ce_pred", "ce_unpred", "prev_best", "ind_best", "penalty",
    ]  # fmt: skip
    assert list(cell.heads) == [
        "arm", "seed", "step", "layer", "head", "prev", "ind", "dir_frac", "D_head", "rope_imag_frac",
        "dir_frac_raw", "D_head_raw", "rope_imag_frac_raw",
    ]  # fmt: skip
    assert list(cell.kernels) == ["arm", "seed", "step", "layer", "head", "offset", "score"]
    assert (len(cell.heads), len(cell.kernels)) == (4 * 4, 4 * 4 * 9)
    for table in cell.tables().values():
        assert table["arm"].unique().tolist() == ["rope_imag"]
        assert table["seed"].unique().tolist() == [1]
    free = train_cell(TINY, ARMS["rope_free"], 1)
    # The penalty acts: measured, it falls by 3.5e-3 in six steps, and by 3e-4 without it.
    assert cell.evaluations["penalty"].iloc[-1] < phase_penalty(free.model).item() - 2e-3
    assert free.evaluations["penalty"].isna().all()
    assert free.evaluations["ce_pred"].iloc[0] == cell.evaluations["ce_pred"].iloc[0]
    assert train_cell(TINY, ARMS["ape_free"], 1).heads["rope_imag_frac"].isna().all()


def test_a_cell_stops_some_steps_after_both_criteria_hold(monkeypatch):
    """The measures of an untrained model are replaced; the schedule of evaluations is the cell's own."""
    from tlspectral.training.constrained import cell

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


# --- the grid ---


def tables_in(folder):
    return {name: read_table(folder / f"{name}.parquet") for name in TABLES}


def same_tables(found, expected):
    for name in TABLES:
        pd.testing.assert_frame_equal(found[name], expected[name])
        assert found[name].attrs == expected[name].attrs


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("grid")
    returned = constrained_grid(folder, TINY, seeds=2, show_progress=False)
    return folder, returned


def test_a_grid_writes_what_it_returns(whole):
    folder, returned = whole
    assert tuple(returned) == TABLES
    same_tables(tables_in(folder), returned)
    cells = returned["evaluations"][["arm", "seed"]].drop_duplicates()
    assert cells.to_numpy().tolist() == [[arm, seed] for arm in ARMS for seed in (0, 1)]
    cell = train_cell(TINY, ARMS["rope_sym"], 1)
    heads = returned["heads"]
    mine = heads[(heads["arm"] == "rope_sym") & (heads["seed"] == 1)].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, cell.heads, rtol=1e-5, atol=1e-7)  # here on more than one thread
    assert returned["formation"]["formed_both"].isna().all()
    assert (returned["table4"]["not_formed_slower"] == 2).all()
    attrs = returned["heads"].attrs
    assert attrs["preset"]["loss_threshold"] == TINY.loss_threshold
    assert attrs["arms"]["rope_imag"] == {
        "positional_embedding_type": "rotary",
        "penalty": "phase_penalty",
        "penalty_weight": 10.0,
    }
    assert attrs["seeds"] == [0, 1]


def test_a_grid_that_was_stopped_goes_on_to_the_same_tables(whole, tmp_path, monkeypatch):
    left, trained = [5], grid.train_cell

    def some(*arguments):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return trained(*arguments)

    monkeypatch.setattr(grid, "train_cell", some)
    with pytest.raises(KeyboardInterrupt):
        constrained_grid(tmp_path, TINY, seeds=2, show_progress=False)
    assert len(list((tmp_path / "cells").glob("*.parquet"))) == 5
    assert not list(tmp_path.glob("*.parquet"))
    left[0] = 5  # those that are there are not trained again
    same_tables(constrained_grid(tmp_path, TINY, seeds=2, show_progress=False), whole[1])
    assert left[0] == 0


def test_more_arms_and_seeds_can_be_added(tmp_path, whole):
    constrained_grid(tmp_path, TINY, arms=["rope_free"], seeds=2, show_progress=False)
    mine = Arm("rope_mine", "rotary", lambda built: built.layers[0].attn.W_V.square().sum(), 0.1)
    more = constrained_grid(tmp_path, TINY, arms=["rope_free", mine], seeds=3, show_progress=False)
    assert more["formation"]["arm"].value_counts().to_dict() == {"rope_free": 3, "rope_mine": 3}
    assert more["table4"].empty
    assert more["heads"].attrs["arms"]["rope_mine"]["penalty"] == "<lambda>"
    assert more["rerouting"].set_index("arm").loc["rope_mine", "free_spread"].notna().all()
    before = whole[1]["kernels"]
    kept = more["kernels"]
    pd.testing.assert_frame_equal(
        kept[(kept["arm"] == "rope_free") & (kept["seed"] < 2)].reset_index(drop=True),
        before[before["arm"] == "rope_free"].reset_index(drop=True),
    )


def test_a_folder_of_other_settings_is_refused(whole):
    folder, _ = whole
    with pytest.raises(IncompatibleCheckpoint, match="was made with other settings"):
        constrained_grid(folder, replace(TINY, stop_after=4), seeds=2, show_progress=False)
    with pytest.raises(IncompatibleCheckpoint, match="was made with other settings"):
        constrained_grid(folder, "quick", seeds=2, show_progress=False)


def test_what_makes_no_grid_is_refused(tmp_path):
    for given, said in (
        ({"preset": "huge"}, "'huge' is no preset; there are paper, quick"),
        ({"arms": ["rope_anti"]}, "'rope_anti' is no arm; there are ape_free, ape_sym"),
        ({"arms": []}, "no arms were given"),
        ({"arms": ["ape_free", "ape_free"]}, "arm 'ape_free' comes twice"),
        ({"arms": [Arm("ape_sym", "standard", symmetric_penalty, 1.0)]}, "'ape_sym' is the name of another arm"),
        ({"seeds": 1}, "seeds=1: contrasts and spreads are over seeds, and need two"),
    ):
        with pytest.raises(ValueError, match=said):
            constrained_grid(tmp_path / "grid", **{"preset": TINY, **given}, show_progress=False)
    assert not (tmp_path / "grid").exists()


@pytest.mark.slow
def test_workers_give_the_same_tables(whole, tmp_path):
    found = constrained_grid(tmp_path, TINY, seeds=2, n_jobs=2, show_progress=False)
    same_tables(found, whole[1])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::ResourceWarning")
@pytest.mark.usefixtures("dask_cluster")
def test_a_dask_cluster_gives_the_same_tables(whole, tmp_path):
    found = constrained_grid(tmp_path, TINY, seeds=2, n_jobs=-1, show_progress=False)
    same_tables(found, whole[1])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "quick", TINY)
    app = typer.Typer()
    app.command()(command.main)
    done = CliRunner().invoke(app, ["-o", str(tmp_path), "--arms", "ape_free, ape_sym", "--seeds", "2"])
    assert done.exit_code == 0, done.output
    assert "evaluations.parquet: 16 rows" in done.output.replace("\n", "")
    assert "falsified" in done.output
    assert (
        read_table(tmp_path / "table4.parquet")
        .attrs["command"]
        .endswith("--preset quick --arms ape_free, ape_sym --seeds 2")
    )
    wrong = CliRunner().invoke(app, ["-o", str(tmp_path), "--arms", "ape_fre"])
    assert wrong.exit_code == 2
    assert "is no arm" in wrong.output


# --- the figure ---


def test_the_figure_stands_where_the_tables_say(whole):
    tables = whole[1]
    times = tables["formation"].assign(formed_both=[4.0, np.nan] * 5, formed_loss=[2.0, np.nan] * 5)
    figure = formation_figure(tables["evaluations"], times, tables["rerouting"], tables["kernels"])
    curves, formed_at, plane, shapes = figure.axes
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["(a)", "(b)", "(c)", "(d)"]
    level, *lines = curves.lines
    assert level.get_ydata()[0] == TINY.loss_threshold  # from the table's attrs
    wide = tables["evaluations"].pivot_table(index="step", columns=["arm", "seed"], values="ce_pred")
    drawn = {tuple(np.round(line.get_ydata(), 9)) for line in lines if len(line.get_ydata())}
    for arm in ARMS:
        for curve in (*wide[arm].to_numpy().T, wide[arm].mean(axis=1).to_numpy()):
            assert tuple(np.round(curve, 9)) in drawn
    hollow, filled, arrows = formed_at.lines[:3]
    np.testing.assert_array_equal(hollow.get_ydata(), [2, np.nan])
    np.testing.assert_array_equal(filled.get_ydata(), [4, np.nan])
    assert arrows.get_ydata().tolist() == [6]
    heads = tables["rerouting"]
    spots = {arm: line for arm, line in zip(ARMS, plane.lines, strict=True)}
    for arm, line in spots.items():
        mine = heads[heads["arm"] == arm]
        assert line.get_xdata().tolist() == mine["dir_frac"].tolist()
        if arm.startswith("rope"):
            assert line.get_ydata().tolist() == mine["rope_imag_frac"].tolist()
        else:
            assert (line.get_ydata() < 0).all()
    assert plane.get_xlabel() == "dir_frac of the previous-token head"
    row = heads.iloc[0]
    kernels = tables["kernels"]
    own = kernels[
        (
            kernels[["arm", "seed", "step", "layer", "head"]] == row[["arm", "seed", "step", "layer", "head"]].tolist()
        ).all(axis=1)
    ]
    np.testing.assert_allclose(shapes.lines[0].get_ydata(), own["score"] - own["score"].mean())
    assert shapes.lines[0].get_xdata().tolist() == list(range(-8, 1))


def test_the_figure_of_published_tables_says_raw(whole):
    tables = whole[1]
    raw = tables["rerouting"].drop(columns=["dir_frac", "D_head", "rope_imag_frac"])
    bare = tables["evaluations"].copy()
    bare.attrs = {}
    figure = formation_figure(bare, tables["formation"], raw, tables["kernels"])
    assert figure.axes[2].get_xlabel().endswith("raw weights")
    assert figure.axes[2].lines[0].get_xdata().tolist() == raw.loc[raw["arm"] == "ape_free", "dir_frac_raw"].tolist()
    thresholds = [
        line for line in figure.axes[0].lines if len(set(line.get_ydata())) == 1 and len(line.get_ydata()) == 2
    ]
    assert not thresholds
    with pytest.raises(ValueError, match="table of kernels has no rows"):
        formation_figure(bare, tables["formation"], raw, tables["kernels"].iloc[:0])
    with pytest.raises(ValueError, match="table of formation has no column last_step: give a table of a constrained"):
        formation_figure(bare, tables["formation"].drop(columns="last_step"), raw, tables["kernels"])
