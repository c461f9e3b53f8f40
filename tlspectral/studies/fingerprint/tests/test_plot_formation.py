"""The figure of constrained training shows what its tables hold."""

import numpy as np
from constrained_preset import TINY

from tlspectral.studies.fingerprint.constrained import ARMS
from tlspectral.studies.fingerprint.figures.formation import formation as formation_figure
from tlspectral.studies.fingerprint.figures.formation import places_around


def test_the_figure_stands_where_the_tables_say(tiny_grid):
    tables = tiny_grid[1]
    times = tables["formation"].assign(formed_both=[4.0, np.nan] * 5, formed_loss=[2.0, np.nan] * 5)
    figure = formation_figure(tables["evaluations"], times, tables["rerouting"], tables["kernels"])
    curves, formed_at, plane, shapes = figure.axes
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
    for arm, line in zip(ARMS, plane.lines, strict=True):
        mine = heads[heads["arm"] == arm]
        assert line.get_xdata().tolist() == mine["dir_frac"].tolist()
        if arm.startswith("rope"):
            assert line.get_ydata().tolist() == mine["rope_imag_frac"].tolist()
        else:
            assert (line.get_ydata() < 0).all()
    run_and_head = ["arm", "seed", "step", "layer", "head"]
    own = tables["kernels"].merge(heads.iloc[:1][run_and_head])
    np.testing.assert_allclose(shapes.lines[0].get_ydata(), own["score"] - own["score"].mean())
    assert shapes.lines[0].get_xdata().tolist() == list(range(-8, 1))
    # The published tables have raw weights alone, and no threshold.
    raw = heads.drop(columns=["dir_frac", "D_head", "rope_imag_frac"])
    bare = tables["evaluations"].copy()
    bare.attrs = {}
    figure = formation_figure(bare, times, raw, tables["kernels"])
    assert figure.axes[2].get_xlabel().endswith("raw weights")
    assert figure.axes[2].lines[0].get_xdata().tolist() == raw.loc[raw["arm"] == "ape_free", "dir_frac_raw"].tolist()
    assert figure.axes[0].lines[0].get_ydata().tolist() == wide["ape_free"][0].tolist()


def test_points_that_share_a_place_stand_beside_one_another():
    assert places_around(3, 1, 0.2).tolist() == [3]
    assert places_around(3, 3, 0.2).tolist() == [2.8, 3.0, 3.2]
