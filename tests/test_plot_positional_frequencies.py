"""Profiles over frequencies show what the tables hold."""

import numpy as np
import pytest
from figure_parts import part
from positional_tables import of_head, per_frequency

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
