"""Figures of spectral training: every line and point is where the table says."""

import itertools

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.bifocal.figures import (
    depth_manifold_plane,
    evolution,
    frequency_paths,
    phase_evolution,
    position_losses,
    resonance_evolution,
    structure_gap_curves,
    training_losses,
)

REFERENCES = pd.DataFrame(
    {"language": ["dyck3", "modulo7"], "entropy_floor": [0.0, 0.1], "chance_loss": [1.3, 1.9], "chance_accuracy": 0.25}
)


def product(**columns):
    """A row for each combination, in another order: figures sort by themselves."""
    rows = pd.DataFrame(itertools.product(*columns.values()), columns=list(columns))
    return rows.assign(number=np.arange(float(len(rows)))).sample(frac=1, random_state=0)


def heights(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return list(np.atleast_1d(line.get_ydata()))


def means(table, column, **kept):
    """Means of a column at each step, over the rows that are kept."""
    for name, value in kept.items():
        table = table[table[name] == value]
    return pytest.approx(table.groupby("step")[column].mean().tolist())


def test_frequencies_stand_above_and_their_ratio_below():
    table = product(step=[0, 10], layer=[0, 1], head=[0, 1], frequency=[0, 1])
    start = np.where(table["frequency"] == 0, 1.0, 0.01)
    table["omega"] = start * np.where(table["step"] == 10, 1 + table["head"] + table["layer"], 1)
    panels = np.array(evolution(table).axes[:4]).reshape(2, 2)
    for layer in (0, 1):
        above, below = ([tuple(line.get_ydata()) for line in axes.lines] for axes in panels[:, layer])
        assert set(above) == {(start, start * (1 + head + layer)) for start in (1.0, 0.01) for head in (0, 1)}
        assert set(below) == {(1.0, float(1 + head + layer)) for head in (0, 1)}


def test_resonance_and_phases_are_means_over_heads_per_arm():
    table = product(arm=["full", "placebo"], step=[0, 5], layer=[0], head=[0, 1], pairs=["all", "turning"])
    table["resonance"] = table["number"]
    for axes, pairs in zip(resonance_evolution(table.sort_values("pairs")).axes, ("all", "turning"), strict=True):
        for arm in ("full", "placebo"):
            assert heights(axes, arm) == means(table, "resonance", arm=arm, pairs=pairs)
    assert len(resonance_evolution(table[table["arm"] == "full"].drop(columns="arm")).axes[0].lines) == 1

    table = product(arm=["full_noise", "full_noise_shared"], step=[0, 5, 10], layer=[0, 1], head=[0])
    table = table.assign(mean_abs=table["number"], start_abs=0.001, drift=table["number"] ** 2)
    (axes,) = phase_evolution(table).axes
    assert len(axes.lines) == 6
    for arm in ("full_noise", "full_noise_shared"):
        assert heights(axes, f"{arm} mean |phase|") == means(table, "mean_abs", arm=arm)
        assert heights(axes, f"{arm} mean |phase| at the start") == means(table, "start_abs", arm=arm)
        assert heights(axes, f"{arm} mean distance from the start") == means(table, "drift", arm=arm)


def test_losses_stand_at_their_positions():
    table = product(adapted=[False, True], position=[0, 128], arm=["fixed", "yarn"])
    table = table.assign(loss=table["number"], low=table["number"] - 0.1, high=table["number"] + 0.1)
    for axes, adapted in zip(position_losses(table).axes, (False, True), strict=True):
        for arm in ("fixed", "yarn"):
            here = table[(table["adapted"] == adapted) & (table["arm"] == arm)].sort_values("position")
            assert heights(axes, arm) == here["loss"].tolist()
        (line,) = [line for line in axes.lines if line.get_label() == "trained length"]
        assert line.get_xdata() == [128, 128]


def test_every_word_is_a_dot_and_depths_are_joined():
    table = product(arm=["standard", "full"], layer=[0], head=[0, 1], word=[0, 1], depth=[1, 2, 3])
    table = table.sort_values("number").assign(pc1=table["number"], pc2=-table["number"], between=0.5)
    panels = [axes for axes in depth_manifold_plane(table).axes if axes.collections and axes.get_title()]
    assert len(panels) == 4
    for place, axes in enumerate(panels):
        here = table.iloc[6 * place : 6 * place + 6]
        np.testing.assert_array_equal(axes.collections[0].get_offsets(), here[["pc1", "pc2"]])
        assert len(np.unique(axes.collections[0].get_facecolors(), axis=0)) == 3
        assert axes.lines[0].get_xdata().tolist() == here.groupby("depth")["pc1"].mean().tolist()


def test_losses_are_smoothed_means_over_seeds_between_floor_and_chance():
    table = product(language=["dyck3", "modulo7"], arm=["standard", "full"], seed=[0, 1], step=[1, 2, 3])
    table["loss"] = np.random.default_rng(0).random(len(table))
    figure = training_losses(table.sort_values("language"), REFERENCES, window=2)
    for axes, (language, levels) in zip(figure.axes, REFERENCES.set_index("language").iterrows(), strict=True):
        assert heights(axes, "entropy floor")[0] == levels["entropy_floor"]
        assert heights(axes, "chance")[0] == levels["chance_loss"]
        for arm in ("standard", "full"):
            here = table[(table["language"] == language) & (table["arm"] == arm)]
            first, second, third = here.groupby("step")["loss"].mean()
            assert heights(axes, arm) == pytest.approx([first, (first + second) / 2, (second + third) / 2])


def test_accuracy_has_its_interval_and_training_its_shade():
    table = product(language=["dyck3"], arm=["standard", "omega"], size=[4, 8, 16])
    table = table.assign(mean=table["number"] / 10, trained=table["size"] <= 8)
    table["low"], table["high"] = table["mean"] - 0.05, table["mean"] + 0.02
    (axes,) = structure_gap_curves(table, REFERENCES).axes
    assert heights(axes, "omega") == pytest.approx([0.3, 0.4, 0.5])
    ends = np.concatenate([one.get_paths()[0].vertices[:, 1] for one in axes.collections])
    assert (ends.min(), ends.max()) == pytest.approx((-0.05, 0.52))
    (shade,) = [patch for patch in axes.patches if patch.get_label() == "trained on"]
    assert (shade.get_x(), shade.get_width()) == (4, 4)
    assert heights(axes, "chance")[0] == 0.25


def test_every_path_is_drawn_and_failures_are_dashed():
    paths = product(task=["retrieval", "index"], start=[0.1, 2.0], seed=[0, 1], step=[0, 5]).sort_values("step")
    paths["omega"] = 7.5 - paths["number"]
    runs = paths[paths["step"] == 0].assign(success=paths["number"] != 2)
    figure = frequency_paths(paths, runs)
    for axes, task, solid in zip(figure.axes, ("retrieval", "index"), (3, 4), strict=True):
        lines = [line for line in axes.lines if len(line.get_xdata())]
        of_task = paths[paths["task"] == task]
        expected = [tuple(path.abs()) for _, path in of_task.groupby(["start", "seed"])["omega"]]
        assert sorted(tuple(line.get_ydata()) for line in lines) == sorted(expected)
        assert sum(line.get_linestyle() == "-" for line in lines) == solid
        assert f"({solid} of 4 runs)" in axes.get_title()
