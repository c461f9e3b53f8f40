"""The figure of constrained training shows what its tables hold."""

import numpy as np
import pytest
from constrained_preset import TINY

from tlspectral.studies.fingerprint.constrained import ARMS
from tlspectral.studies.fingerprint.figures.formation import formation as formation_figure
from tlspectral.studies.fingerprint.figures.formation import places_around


def test_the_figure_stands_where_the_tables_say(tiny_grid):
    tables = tiny_grid[1]
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


def test_the_figure_of_published_tables_says_raw(tiny_grid):
    tables = tiny_grid[1]
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


def test_points_that_share_a_place_stand_beside_one_another():
    assert places_around(3, 1, 0.2).tolist() == [3]
    assert places_around(3, 3, 0.2).tolist() == pytest.approx([2.8, 3.0, 3.2])
