"""Profiles, grids, paths and norms over frequencies show what the tables hold."""

import io

import numpy as np
import pandas as pd
import pytest
from figure_parts import offsets, part, said
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from positional_tables import N_FREQUENCIES, N_HEADS, N_LAYERS, norms, of_head, per_frequency

from tlspectral import plots


def test_profiles_show_both_scores_the_spread_and_wavelengths():
    table = per_frequency()
    heads = [(0, 0), "L3H1", (1, 2), (2, 2)]
    figure = plots.frequency_profile(table, heads)
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == ["L0H0", "L3H1", "L1H2", "L2H2"]
    strips = [axes for axes in figure.axes if part(axes, "logit_std")]
    for axes, strip, (layer, head) in zip(panels, strips, [(0, 0), (3, 1), (1, 2), (2, 2)], strict=True):
        rows = of_head(table, layer, head)
        for score in ("s_pos", "s_sym"):
            (line,) = part(axes, score)
            np.testing.assert_array_equal(line.get_xdata(), rows["frequency"])
            np.testing.assert_array_equal(line.get_ydata(), rows[score])
        outline = part(strip, "logit_std")[0].get_paths()[0].vertices
        np.testing.assert_allclose(
            [outline[(outline[:, 0] == index), 1].max() for index in rows["frequency"]], rows["logit_std"]
        )
        (above,) = axes.child_axes
        ticks = dict(zip(above.get_xticks(), (label.get_text() for label in above.get_xticklabels()), strict=True))
        # theta = 10^-t, so 2 pi 10^t tokens.
        assert ticks == {0: "6.3", 2: "628", 4: "63k", 6: "6.3M"}
    assert {strip.get_ylim() for strip in strips} == {strips[0].get_ylim()}
    assert all(strip.get_yscale() == "log" for strip in strips)
    loud = table.assign(logit_std=table["logit_std"].where(table["layer"] < 3, 500.0))
    strips = [axes for axes in plots.frequency_profile(loud, heads).axes if part(axes, "logit_std")]
    assert {strip.get_ylim()[1] for strip in strips} == {1000.0}
    flat = plots.frequency_profile(table.assign(logit_std=0.0), [(0, 0)]).axes[1]
    assert part(flat, "logit_std")[0].get_paths()[0].vertices[:, 1].max() == 0.1
    # matplotlib 3.9 is off the limit it was given by 1e-17.
    assert flat.get_ylim()[0] == pytest.approx(0.1, rel=1e-12)
    longest = plots.frequency_profile(table.assign(theta=0.0), [(0, 0)]).axes[0].child_axes[0]
    assert {label.get_text() for label in longest.get_xticklabels()} == {"∞"}
    wavelength = plots.frequency_profile(table.assign(wavelength=1234.0), [(0, 0)]).axes[0].child_axes[0]
    assert {label.get_text() for label in wavelength.get_xticklabels()} == {"1.2k"}
    bare = plots.frequency_profile(table.drop(columns=["theta", "logit_std"]), [(0, 0)])
    assert bare.axes[0].child_axes == []
    assert len(bare.axes) == 1


def test_the_grid_has_each_profile_in_its_cell_and_one_axes_for_all():
    table = per_frequency()
    table.loc[(table["layer"] == 2) & (table["head"] == 1) & (table["frequency"] == 3), "s_pos"] = np.nan
    figure = plots.frequency_grid(table)
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
    figure = plots.frequency_grid(table)
    assert len(figure.axes) == 1
    assert len(figure.axes[0].collections) == 4  # two scores, lines across, lines down
    figure.savefig(io.BytesIO(), format="png", dpi=50)


def test_the_path_joins_the_frequencies_in_order():
    table = per_frequency()
    figure = plots.frequency_path(table, "L1H1")
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
    figure = plots.frequency_norms(table, (0, 1))
    rows = of_head(table, 0, 1)
    for axes, column in zip(figure.axes, ("logit_norm", "key_norm"), strict=True):
        bars = part(axes, column)
        assert [bar.get_height() for bar in bars] == pytest.approx(rows[column].tolist())
        assert [bar.get_x() + bar.get_width() / 2 for bar in bars] == pytest.approx(rows["frequency"].tolist())
    assert len(figure.axes[0].child_axes) == 1
