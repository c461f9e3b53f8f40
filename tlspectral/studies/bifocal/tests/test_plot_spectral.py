"""Figures of spectral training: every line and point is where the table says."""

import itertools

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.bifocal.figures import (
    depth_manifold_plane,
    evolution,
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
    return pd.DataFrame(itertools.product(*columns.values()), columns=list(columns))


def labelled(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return line


def test_frequencies_stand_above_and_their_ratio_below():
    table = product(step=[0, 10], layer=[0, 1], head=[0, 1], frequency=[0, 1])
    start = np.where(table["frequency"] == 0, 1.0, 0.01)
    table["omega"] = start * np.where(table["step"] == 10, 1 + table["head"] + table["layer"], 1)
    panels = np.array(evolution(table.sample(frac=1, random_state=0)).axes[:4]).reshape(2, 2)
    for layer in (0, 1):
        above, below = ([tuple(line.get_ydata()) for line in axes.lines] for axes in panels[:, layer])
        expected = {(start, start * (1 + head + layer)) for start in (1.0, 0.01) for head in (0, 1)}
        assert set(above) == expected
        assert set(below) == {(1.0, float(1 + head + layer)) for head in (0, 1)}
        assert panels[0, layer].get_yscale() == "log"
        assert panels[0, layer].get_title() == f"layer {layer}"
        assert len({line.get_color() for line in panels[0, layer].lines}) == 2


def test_resonance_is_the_mean_over_heads_per_arm():
    table = product(arm=["full", "placebo"], step=[0, 5], layer=[0], head=[0, 1], pairs=["all", "turning"])
    table["resonance"] = np.arange(len(table), dtype=float)
    for axes, pairs in zip(resonance_evolution(table).axes, ("all", "turning"), strict=True):
        assert axes.get_title() == f"{pairs} pairs"
        for arm in ("full", "placebo"):
            here = table[(table["pairs"] == pairs) & (table["arm"] == arm)]
            expected = [here.loc[here["step"] == step, "resonance"].mean() for step in (0, 5)]
            assert labelled(axes, arm).get_ydata().tolist() == expected
    one = table[table["arm"] == "full"].drop(columns="arm")
    assert len(resonance_evolution(one).axes[0].lines) == 1


def test_losses_stand_at_their_positions():
    table = product(adapted=[False, True], position=[0, 128], arm=["fixed", "yarn"])
    table["loss"] = np.arange(8.0)
    table = table.assign(low=table["loss"] - 0.1, high=table["loss"] + 0.1)
    for axes, adapted in zip(position_losses(table.sample(frac=1, random_state=0)).axes, (False, True), strict=True):
        for arm in ("fixed", "yarn"):
            line = labelled(axes, arm)
            here = table[(table["adapted"] == adapted) & (table["arm"] == arm)]
            assert line.get_xdata().tolist() == [0, 128]
            assert line.get_ydata().tolist() == here["loss"].tolist()
        assert labelled(axes, "trained length").get_xdata() == [128, 128]


def test_phases_stand_against_their_start():
    table = product(arm=["full_noise", "full_noise_shared"], step=[0, 5, 10], layer=[0, 1], head=[0])
    table["mean_abs"], table["start_abs"] = np.arange(12) / 100, 0.001
    table["drift"] = table["mean_abs"] / 2
    (axes,) = phase_evolution(table).axes
    assert len(axes.lines) == 6
    assert labelled(axes, "full_noise mean |phase|").get_ydata().tolist() == pytest.approx([0.005, 0.025, 0.045])
    drift = labelled(axes, "full_noise_shared mean distance from the start")
    assert drift.get_ydata().tolist() == pytest.approx([0.0325, 0.0425, 0.0525])
    start = labelled(axes, "full_noise mean |phase| at the start")
    assert start.get_ydata().tolist() == pytest.approx([0.001] * 3)
    assert start.get_linestyle() == ":"


def test_every_word_is_a_dot_and_depths_are_joined():
    table = product(arm=["standard", "full"], layer=[0], head=[0, 1], word=[0, 1], depth=[1, 2, 3])
    table["pc1"], table["pc2"], table["between"] = np.arange(24.0), -np.arange(24.0), 0.5
    figure = depth_manifold_plane(table)
    panels = [axes for axes in figure.axes if axes.collections and axes.get_title()]
    assert [axes.get_title() for axes in panels] == [f"L0H{head}  between 0.50" for head in (0, 1)] * 2
    for place, axes in enumerate(panels):
        here = table.iloc[6 * place : 6 * place + 6]
        np.testing.assert_array_equal(axes.collections[0].get_offsets(), here[["pc1", "pc2"]])
        assert len(np.unique(axes.collections[0].get_facecolors(), axis=0)) == 3
        expected = [here.loc[here["depth"] == depth, "pc1"].mean() for depth in (1, 2, 3)]
        assert axes.lines[0].get_xdata().tolist() == expected
    assert [axes.get_ylabel() for axes in panels[::2]] == ["standard", "full"]


def test_losses_are_smoothed_means_over_seeds_between_floor_and_chance():
    table = product(language=["dyck3", "modulo7"], arm=["standard", "full"], seed=[0, 1], step=[1, 2, 3])
    table["loss"] = np.random.default_rng(0).random(len(table))
    for axes, language in zip(training_losses(table, REFERENCES, window=2).axes, ("dyck3", "modulo7"), strict=True):
        levels = REFERENCES.set_index("language").loc[language]
        assert labelled(axes, "entropy floor").get_ydata()[0] == levels["entropy_floor"]
        assert labelled(axes, "chance").get_ydata()[0] == levels["chance_loss"]
        for arm in ("standard", "full"):
            here = table[(table["language"] == language) & (table["arm"] == arm)]
            mean = here.groupby("step")["loss"].mean().tolist()
            expected = [mean[0], (mean[0] + mean[1]) / 2, (mean[1] + mean[2]) / 2]
            assert labelled(axes, arm).get_ydata().tolist() == pytest.approx(expected)
        assert len(axes.lines) == 2 + 2 * 3
        assert axes.get_ylabel() == "loss (nats per scored token)"


def test_accuracy_has_its_interval_and_training_its_shade():
    table = product(language=["dyck3"], arm=["standard", "omega"], size=[4, 8, 16])
    table["mean"] = [0.9, 0.8, 0.4, 0.95, 0.85, 0.3]
    table["low"], table["high"] = table["mean"] - 0.05, table["mean"] + 0.02
    table["trained"] = table["size"] <= 8
    (axes,) = structure_gap_curves(table.sample(frac=1, random_state=1), REFERENCES).axes
    line = labelled(axes, "omega")
    assert line.get_xdata().tolist() == [4, 8, 16]
    assert line.get_ydata().tolist() == [0.95, 0.85, 0.3]
    band = max((one.get_paths()[0].vertices for one in axes.collections), key=lambda places: places[:, 1].max())
    assert band[:, 1].max() == pytest.approx(0.97)
    (shade,) = [patch for patch in axes.patches if patch.get_label() == "trained on"]
    assert (shade.get_x(), shade.get_width()) == (4, 4)
    assert labelled(axes, "chance").get_ydata()[0] == 0.25
    assert axes.get_xlabel() == "depth"


@pytest.mark.parametrize(
    ("draw", "columns"),
    [
        (evolution, "step layer head frequency omega"),
        (resonance_evolution, "step pairs resonance"),
        (phase_evolution, "step mean_abs start_abs drift"),
        (depth_manifold_plane, "layer head depth pc1 pc2 between"),
        (lambda table: training_losses(table, REFERENCES), "language seed step loss"),
        (lambda table: structure_gap_curves(table, REFERENCES), "language size mean low high trained"),
    ],
)
def test_a_table_without_rows_or_without_a_column_is_refused(draw, columns):
    table = pd.DataFrame(columns=columns.split())
    with pytest.raises(ValueError, match="has no rows: give a table of"):
        draw(table)
    for column in table:
        with pytest.raises(ValueError, match=f"has no column {column}: give a table of"):
            draw(table.drop(columns=column))


@pytest.mark.parametrize(
    ("draw", "columns", "column"),
    [
        (training_losses, "language seed step loss", "chance_loss"),
        (structure_gap_curves, "language size mean low high trained", "chance_accuracy"),
    ],
)
def test_references_without_a_column_are_refused(draw, columns, column):
    table = pd.DataFrame({name: [0] for name in columns.split()})
    with pytest.raises(
        ValueError, match=f"table of references has no column {column}: give a table of the experiment languages"
    ):
        draw(table, REFERENCES.drop(columns=column))
