"""The three acts: every point is where the table says, the window where the crossing is, the null where it belongs."""

from importlib.resources import as_file, files

import numpy as np
import pandas as pd
import pytest

from tlspectral.studies.fingerprint.figures.checkpoints import checkpoint_acts
from tlspectral.studies.fingerprint.history_questions import formation_crossing

PUBLISHED = {
    "pythia-410m": {"prev_beh": "prev", "rif_pct_52": "rope_imag_frac_pct", "pop_med_D": "D_head_median"},
    "pythia-160m": {"prev_beh": "prev", "rif_pct": "rope_imag_frac_pct", "pop_med_D": "D_head_median"},
}


def published(name):
    with as_file(files("tlspectral") / "data" / "published" / f"{name}_ckpt_analysis.parquet") as path:
        return pd.read_parquet(path).rename(columns=PUBLISHED[name])


def track(**changes):
    columns = {
        "step": [0, 100, 200, 300],
        "prev": [0.0, 0.1, 0.8, 0.9],
        "rope_imag_frac_pct": [0.4, 0.3, 0.95, 1.0],
        "D_head_median": [0.6, 0.6, 0.5, 0.4],
        "D_head_null_median": [0.6, 0.61, 0.6, 0.59],
        "D_head_null_low": [0.55, 0.56, 0.57, 0.58],
        "D_head_null_high": [0.65, 0.66, 0.67, 0.68],
    }
    return pd.DataFrame({**columns, **changes})


def found(axes, gid):
    return [artist for artist in axes.get_children() if artist.get_gid() == gid]


def bounds(axes):
    [window] = found(axes, "window")
    box = window.get_path().get_extents(window.get_patch_transform())
    return box.x0, box.x1


def series(axes, label):
    [line] = [line for line in axes.lines if line.get_label() == label]
    return line


def test_one_history():
    table = track()
    panels = checkpoint_acts(table).axes
    assert len(panels) == 3
    for axes, column in zip(panels, ("prev", "rope_imag_frac_pct", "D_head_median"), strict=True):
        line = series(axes, column)
        assert line.get_xdata().tolist() == [0, 100, 200, 300]
        assert line.get_ydata().tolist() == table[column].tolist()
        assert bounds(axes) == pytest.approx((100, 200))
        assert axes.get_xscale() == "linear"
    [null] = found(panels[2], "null")
    assert null.get_ydata().tolist() == table["D_head_null_median"].tolist()
    [shade] = found(panels[2], "null range")
    corners = {tuple(corner) for corner in shade.get_paths()[0].vertices.round(9)}
    assert {(200.0, 0.57), (300.0, 0.68)} <= corners
    [middle] = found(panels[1], "middle")
    assert set(middle.get_ydata()) == {0.5}


def test_the_published_histories():
    tables = {name: published(name) for name in PUBLISHED}
    figure = checkpoint_acts(tables, null=0.61)
    for axes, column in zip(figure.axes, ("prev", "rope_imag_frac_pct", "D_head_median"), strict=True):
        lines = [series(axes, name) for name in tables]
        for line, table in zip(lines, tables.values(), strict=True):
            assert line.get_ydata().tolist() == table[column].tolist()
        for look in ("get_color", "get_marker", "get_linestyle"):
            assert getattr(lines[0], look)() != getattr(lines[1], look)()
        assert bounds(axes) == pytest.approx((512, 1000))
        assert axes.get_xscale() == "symlog"
        assert axes.get_xlim()[0] < 0 < 143_000 < axes.get_xlim()[1]
    [null] = found(figure.axes[2], "null")
    assert set(null.get_ydata()) == {0.61}
    [legend] = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        *tables,
        "formation window",
        "middle of the heads",
        "null of the median",
    ]
    crossing = formation_crossing(tables["pythia-410m"])
    assert (crossing.behaviour.after, crossing.behaviour.step) == (512, 1000)


def test_the_window_spans_all_models():
    late = track(prev=[0.0, 0.1, 0.2, 0.9])
    assert bounds(checkpoint_acts({"early": track(), "late": late}).axes[0]) == pytest.approx((100, 300))
    assert bounds(checkpoint_acts({"late": late}).axes[0]) == pytest.approx((200, 300))
    assert bounds(checkpoint_acts(track(), formed=0.85).axes[0]) == pytest.approx((200, 300))
    assert bounds(checkpoint_acts(track(), window=(20, 250)).axes[0]) == pytest.approx((20, 250))
    never = checkpoint_acts(track(prev=0.1))
    assert not found(never.axes[0], "window")
    assert "formation window" not in [text.get_text() for text in never.legends[0].get_texts()]


def test_a_null_without_a_range_is_a_line():
    axes = checkpoint_acts(track().drop(columns="D_head_null_low")).axes[2]
    assert found(axes, "null")
    assert not found(axes, "null range")


def test_bad_tables():
    with pytest.raises(ValueError, match="one to 4 models, found 0"):
        checkpoint_acts({})
    with pytest.raises(ValueError, match="one to 4 models, found 5"):
        checkpoint_acts({str(place): track() for place in range(5)})
    with pytest.raises(ValueError, match="no column prev"):
        checkpoint_acts(track().drop(columns="prev"))
    with pytest.raises(ValueError, match="of small has NaN in column 'D_head_median'"):
        checkpoint_acts({"small": track(D_head_median=np.nan)})
    with pytest.raises(ValueError, match="no column D_head_null_median"):
        checkpoint_acts(track().drop(columns="D_head_null_median"))
