"""Grids, paths and norms over frequencies show what the tables hold."""

import io

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part, said
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from positional_tables import N_FREQUENCIES, N_HEADS, N_LAYERS, norms, of_head, per_frequency

from tlspectral.studies.positional_symbolic import figures


def test_the_grid_has_each_profile_in_its_cell_and_one_axes_for_all():
    table = per_frequency()
    table.loc[(table["layer"] == 2) & (table["head"] == 1) & (table["frequency"] == 3), "s_pos"] = np.nan
    figure = figures.frequency_grid(table)
    (axes,) = figure.axes
    for score in ("s_pos", "s_sym"):
        (lines,) = part(figure, score)
        assert isinstance(lines, LineCollection)
        segments = lines.get_segments()
        paths = [path.vertices for path in lines.get_paths()]
        assert len(segments) == len(paths) == N_LAYERS * N_HEADS
        for number, path in enumerate(paths):
            layer, head = divmod(number, N_HEADS)
            rows = of_head(table, layer, head)
            across = (path[:, 0] - head - 0.06) / 0.88 * (N_FREQUENCIES - 1)
            np.testing.assert_allclose(across, rows["frequency"], atol=1e-9)
            np.testing.assert_allclose((layer + 0.92 - path[:, 1]) / 0.84, rows[score], atol=1e-9)
    assert axes.yaxis_inverted()
    assert "not drawn: 1 row with NaN in s_pos" in said(figure)


def test_a_grid_of_a_real_models_size_has_few_artists():
    index = pd.MultiIndex.from_product([range(30), range(9), range(32)], names=["layer", "head", "frequency"])
    table = index.to_frame(index=False).assign(s_pos=0.5, s_sym=0.6)
    figure = figures.frequency_grid(table)
    assert len(figure.axes) == 1
    assert len(figure.axes[0].collections) == 4  # two scores, lines across, lines down
    figure.savefig(io.BytesIO(), format="png", dpi=50)


def test_the_path_joins_the_frequencies_in_order():
    table = per_frequency()
    figure = figures.frequency_path(table, "L1H1")
    rows = of_head(table, 1, 1)
    places = rows[["s_pos", "s_sym"]].to_numpy()
    np.testing.assert_array_equal(offsets(figure, "frequencies"), places)
    steps = part(figure, "path")[0].get_segments()
    np.testing.assert_array_equal(np.array(steps), np.stack([places[:-1], places[1:]], axis=1))
    colours = part(figure, "frequencies")[0].get_facecolors()
    assert len({to_hex(colour) for colour in colours}) == N_FREQUENCIES
    for label in part(figure, "named frequency"):
        assert label.xy == pytest.approx(tuple(places[int(label.get_text())]))


def test_norms_are_bars_over_frequencies():
    table = norms()
    figure = figures.frequency_norms(table, (0, 1))
    rows = of_head(table, 0, 1)
    for axes, column in zip(figure.axes, ("logit_norm", "key_norm"), strict=True):
        bars = part(axes, column)
        assert [bar.get_height() for bar in bars] == pytest.approx(rows[column].tolist())
        assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == pytest.approx(rows["frequency"].tolist())
    assert len(figure.axes[0].child_axes) == 1
