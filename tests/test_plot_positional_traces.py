"""Attention before and after swaps, and queries and keys on a rotary plane, are drawn where the tables say."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part
from matplotlib.colors import to_hex
from positional_tables import projections, traces

from tlspectral import plots


def test_traces_have_a_row_per_frequency_and_a_column_per_swap():
    table = traces()
    figure = plots.attention_traces(table)
    assert [axes.get_title() for axes in figure.axes[:2]] == ["1 ↔ 3", "2 ↔ 4"]
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == ["whole head", "frequency 0", "frequency 5"]
    for number, axes in enumerate(figure.axes):
        frequency, (i, j) = (None, 0, 5)[number // 2], ((1, 3), (2, 4))[number % 2]
        same = table["frequency"].isna() if frequency is None else table["frequency"].eq(frequency).fillna(False)
        rows = table[same & (table["swap_i"] == i) & (table["swap_j"] == j)].sort_values("block")
        for when in ("before", "after"):
            (line,) = part(axes, when)
            np.testing.assert_array_equal(line.get_xdata(), rows["block"])
            np.testing.assert_array_equal(line.get_ydata(), rows[when])
            assert line.get_ydata().max() < axes.get_ylim()[1]
        bands = part(axes, "swapped block")
        assert [band.get_x() + band.get_width() / 2 for band in bands] == pytest.approx([i, j])
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_queries_and_keys_lie_where_they_are():
    table = projections()
    figure = plots.rotary_plane(table)
    for kind in ("query", "key"):
        np.testing.assert_array_equal(offsets(figure, kind), table.loc[table["kind"] == kind, ["x", "y"]])
    colours = {to_hex(part(figure, kind)[0].get_facecolors()[0]) for kind in ("query", "key")}
    assert len(colours) == 2
    assert figure.axes[0].get_aspect() == 1
    named = [(label.get_text(), label.xy) for label in part(figure, "named point")]
    assert [text for text, _ in named] == [str(position) for position in table["position"]]
    np.testing.assert_allclose([place for _, place in named], table[["x", "y"]])
    labelled = plots.rotary_plane(projections(label=list("abcdefghi")))
    assert {label.get_text() for label in part(labelled, "named point")} == set("abcdefghi")


def test_steps_are_joined_and_the_last_one_drawn():
    first, last = projections(step=0), projections(step=100)
    last[["x", "y"]] += 1
    table = pd.concat([last, first], ignore_index=True)
    figure = plots.rotary_plane(table)
    for kind in ("query", "key"):
        end = last.loc[last["kind"] == kind, ["x", "y"]].to_numpy()
        start = first.loc[first["kind"] == kind, ["x", "y"]].to_numpy()
        np.testing.assert_array_equal(offsets(figure, kind), end)
        paths = part(figure, f"{kind} path")[0].get_segments()
        np.testing.assert_array_equal(np.array(paths), np.stack([start, end], axis=1))
