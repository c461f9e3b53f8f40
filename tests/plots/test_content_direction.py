"""The plane shows every head, the nulls where the table has them, and the heads it claims to ring."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import colours_by_layer, offsets, part, said
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from plotted_tables import heads

from tlspectral.plots import plane

pytestmark = pytest.mark.lowest


def names(figure: Figure) -> list[str]:
    return [label.get_text() for label in part(figure, "previous-token head")]


@pytest.mark.slow
def test_every_head_is_a_point_coloured_by_its_layer():
    table = heads()
    before = table.copy()
    figure = plane(table)
    pd.testing.assert_frame_equal(table, before)
    np.testing.assert_array_equal(offsets(figure, "heads"), table[["dir_frac", "D_head"]])
    by_layer = colours_by_layer(figure, table["layer"])
    assert all(len(found) == 1 for found in by_layer.values())
    colours = set.union(*by_layer.values())
    assert len(colours) == 4
    assert figure.axes[0].get_title(loc="left") == "tiny-model"
    assert figure.axes[0].get_xlabel().startswith("directional share (dir_frac)")
    assert figure.axes[0].child_axes[0].get_ylabel() == "layer"
    # Print: the palest layer still differs from the paper by 3:1 or so in luminance.
    luminance = max(np.dot(colour[:3], [0.2126, 0.7152, 0.0722]) for colour in colours)
    assert luminance < 0.8


@pytest.mark.slow
def test_the_nulls_stand_at_the_medians_of_the_table():
    table = heads()
    figure = plane(table)
    (across,), (up,) = part(figure, "dir_frac null mean"), part(figure, "D_head null mean")
    assert across.get_xdata() == pytest.approx([0.7065, 0.7065])
    centre, deviation = table["D_head_null_mean"].median(), table["D_head_null_std"].median()
    assert up.get_ydata() == pytest.approx([centre, centre])
    (band,) = part(figure, "D_head null band")
    assert (band.get_y(), band.get_height()) == pytest.approx((centre - 2 * deviation, 4 * deviation))
    assert any(f"{centre:.3f}" in line and "2 sd" in line for line in said(figure).splitlines())


@pytest.mark.slow
def test_the_strongest_previous_token_heads_are_ringed_and_named():
    table = heads()
    strongest = table.nlargest(3, "prev")
    figure = plane(table, highlight_previous_token=3)
    np.testing.assert_array_equal(offsets(figure, "previous-token heads"), strongest[["dir_frac", "D_head"]])
    assert names(figure) == list(strongest["name"])
    assert "3 strongest previous-token heads" in said(figure)
    (rings,) = part(figure, "previous-token heads")
    assert tuple(rings.get_edgecolors()[0]) == to_rgba("#c8102e")


@pytest.mark.slow
def test_names_are_inside_and_do_not_overlap_where_heads_crowd():
    table = heads()
    table["dir_frac"], table["D_head"] = 0.7 + 0.001 * table["head"], 0.5 + 0.002 * table["layer"]
    table.loc[0, ["dir_frac", "D_head"]] = [0.9, 0.9]
    figure = plane(table, highlight_previous_token=8)
    figure.draw_without_rendering()
    labels = part(figure, "previous-token head")
    assert len(labels) == 8
    assert all(isinstance(label, Annotation) for label in labels)
    boxes = [Text.get_window_extent(label) for label in labels]
    assert not any(one.overlaps(other) for number, one in enumerate(boxes) for other in boxes[:number])
    frame = figure.axes[0].get_window_extent()
    assert all(frame.contains(*box.min) and frame.contains(*box.max) for box in boxes)


def test_without_detectors_nothing_is_ringed():
    table = heads()
    for without, count in ((table.drop(columns="prev"), 5), (table.assign(prev=np.nan), 5), (table, 0)):
        figure = plane(without, highlight_previous_token=count)
        assert part(figure, "previous-token heads") == names(figure) == []
        assert len(offsets(figure, "heads")) == len(table)


@pytest.mark.slow
def test_heads_without_a_number_are_left_out_and_said_so():
    table = heads()
    first = table["prev"].idxmax()
    table.loc[[first, 3], "D_head"] = np.nan
    figure = plane(table, highlight_previous_token=2)
    assert len(offsets(figure, "heads")) == len(table) - 2
    assert table.loc[first, "name"] not in names(figure)
    (note,) = [line for line in said(figure).splitlines() if line.startswith("not drawn")]
    assert "2 (" in note
    assert table.loc[first, "name"] in note


@pytest.mark.slow
def test_a_table_without_null_or_names_is_drawn_without_them():
    table = heads()[["layer", "head", "dir_frac", "D_head", "prev"]]
    table.index = [7] * len(table)
    figure = plane(table, highlight_previous_token=1)
    assert part(figure, "D_head null mean") == []
    best = table.iloc[table["prev"].argmax()]
    assert names(figure) == [f"L{best['layer']:.0f}H{best['head']:.0f}"]
    with_nan = heads().assign(D_head_null_mean=np.nan)
    figure = plane(with_nan)
    assert part(figure, "D_head null mean") == []
    assert len(part(figure, "dir_frac null mean")) == 1
