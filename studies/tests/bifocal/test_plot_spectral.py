"""Figures of spectral training: every line and point is where the table says."""

import itertools
from functools import partial

import numpy as np
import pandas as pd
import pytest
from figure_parts import small_texts
from tlspectral_studies.bifocal import figures

pytestmark = pytest.mark.lowest

REFERENCES = pd.DataFrame(
    {"language": ["dyck3", "modulo7"], "entropy_floor": [0.0, 0.1], "chance_loss": [1.3, 1.9], "chance_accuracy": 0.25}
)
ARMS = ["omega", "full"]


def product(**columns):
    """A row for each combination, in another order: figures sort by themselves."""
    rows = pd.DataFrame(itertools.product(*columns.values()), columns=list(columns))
    return rows.assign(number=np.arange(float(len(rows)))).sample(frac=1, random_state=0)


def heights(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(np.atleast_1d(line.get_ydata()))


NUMBERS = ["resonance", "mean_abs", "start_abs", "drift", "loss", "mean"]
PHASES = {
    " mean |phase|": "mean_abs",
    " mean |phase| at the start": "start_abs",
    " mean distance from the start": "drift",
}
# The figure, what its lines go along, its rows, what a panel holds, and the column of each line.
LINES = {
    "resonance": (
        figures.resonance_evolution,
        {"step": [0, 5], "pairs": ["all", "turning"]},
        "pairs",
        {"": "resonance"},
    ),
    "phases": (figures.phase_evolution, {"step": [0, 5, 10], "pairs": ["all"]}, "pairs", PHASES),
    "positions": (figures.position_losses, {"position": [0, 128], "adapted": [False, True]}, "adapted", {"": "loss"}),
    "losses": (
        partial(figures.training_losses, references=REFERENCES, window=1),
        {"step": [1, 2, 3], "language": ["dyck3", "modulo7"]},
        "language",
        {"": "loss"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("draw", "columns", "panel", "lines"), LINES.values(), ids=LINES)
def test_a_line_per_arm_is_the_mean_of_its_rows(draw, columns, panel, lines):
    seeds = [0] if panel == "adapted" else [0, 1]
    table = product(**columns, arm=ARMS, seed=seeds, layer=[0]).sort_values(panel)
    table[NUMBERS] = np.random.default_rng(0).random((len(table), len(NUMBERS)))
    drawn = draw(table.assign(low=-1.0, high=2.0))
    assert small_texts(drawn) == {}
    for axes, (_, rows) in zip(drawn.axes, table.groupby(panel), strict=True):
        for (arm, of_arm), (label, column) in itertools.product(rows.groupby("arm"), lines.items()):
            expected = of_arm.groupby(next(iter(columns)))[column].mean()
            assert heights(axes, arm + label) == pytest.approx(expected.tolist())


def test_frequencies_stand_above_and_their_ratio_below():
    table = product(step=[0, 10], layer=[0, 1], head=[0, 1], frequency=[0, 1])
    start = np.where(table["frequency"] == 0, 1.0, 0.01)
    table["omega"] = start * np.where(table["step"] == 10, 1 + table["head"] + table["layer"], 1)
    panels = np.array(figures.evolution(table).axes[:4]).reshape(2, 2)
    for layer in (0, 1):
        above, below = ([tuple(line.get_ydata()) for line in axes.lines] for axes in panels[:, layer])
        assert set(above) == {(start, start * (1 + head + layer)) for start in (1.0, 0.01) for head in (0, 1)}
        assert set(below) == {(1.0, float(1 + head + layer)) for head in (0, 1)}


def test_every_word_is_a_dot_and_depths_are_joined():
    table = product(arm=["standard", "full"], layer=[0], head=[0, 1], word=[0, 1], depth=[1, 2, 3])
    table = table.sort_values("number").assign(pc1=table["number"], pc2=-table["number"], between=0.5)
    panels = [axes for axes in figures.depth_manifold_plane(table).axes if axes.collections and axes.get_title()]
    assert len(panels) == 4
    for place, axes in enumerate(panels):
        here = table.iloc[6 * place : 6 * place + 6]
        np.testing.assert_array_equal(axes.collections[0].get_offsets(), here[["pc1", "pc2"]])
        assert len(np.unique(axes.collections[0].get_facecolors(), axis=0)) == 3
        assert axes.lines[0].get_xdata().tolist() == here.groupby("depth")["pc1"].mean().tolist()


def test_losses_are_smoothed_between_floor_and_chance_and_the_trained_length_is_marked():
    table = pd.DataFrame({"language": "modulo7", "arm": "full", "seed": 0, "step": [1, 2, 3], "loss": [0.9, 0.5, 0.3]})
    (axes,) = figures.training_losses(table, REFERENCES, window=2).axes
    assert heights(axes, "full") == pytest.approx([0.9, 0.7, 0.4])
    assert (heights(axes, "entropy floor")[0], heights(axes, "chance")[0]) == (0.1, 1.9)
    places = pd.DataFrame({"adapted": False, "arm": "full", "position": [0, 128], "loss": 1.0, "low": 0.5, "high": 1.5})
    (line,) = [line for line in figures.position_losses(places).axes[0].lines if line.get_label() == "trained length"]
    assert line.get_xdata() == [128, 128]


def test_accuracy_has_its_interval_and_training_its_shade():
    table = product(language=["dyck3"], arm=ARMS, size=[4, 8, 16])
    table = table.assign(mean=table["number"] / 10, trained=table["size"] <= 8)
    table["low"], table["high"] = table["mean"] - 0.05, table["mean"] + 0.02
    (axes,) = figures.structure_gap_curves(table, REFERENCES).axes
    assert heights(axes, "full") == pytest.approx([0.3, 0.4, 0.5])
    ends = np.concatenate([one.get_paths()[0].vertices[:, 1] for one in axes.collections])
    assert (ends.min(), ends.max()) == pytest.approx((-0.05, 0.52))
    (shade,) = [patch for patch in axes.patches if patch.get_label() == "trained on"]
    assert (shade.get_x(), shade.get_width()) == (4, 4)
    assert heights(axes, "chance")[0] == 0.25


def test_every_path_is_drawn_and_failures_are_dashed():
    paths = product(task=["retrieval", "index"], start=[0.1, 2.0], seed=[0, 1], step=[0, 5]).sort_values("step")
    paths["omega"] = 7.5 - paths["number"]
    runs = paths[paths["step"] == 0].assign(success=paths["number"] != 2)
    figure = figures.frequency_paths(paths, runs)
    for axes, task, solid in zip(figure.axes, ("retrieval", "index"), (3, 4), strict=True):
        lines = [line for line in axes.lines if len(line.get_xdata())]
        of_task = paths[paths["task"] == task]
        expected = [tuple(path.abs()) for _, path in of_task.groupby(["start", "seed"])["omega"]]
        assert sorted(tuple(line.get_ydata()) for line in lines) == sorted(expected)
        assert sum(line.get_linestyle() == "-" for line in lines) == solid
        assert f"({solid} of 4 runs)" in axes.get_title(loc="left")
