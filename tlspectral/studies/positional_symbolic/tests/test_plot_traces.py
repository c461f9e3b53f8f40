"""Attention before and after swaps is drawn where the table says."""

import numpy as np
import pytest
from figure_parts import part
from positional_tables import traces

from tlspectral.studies.positional_symbolic import figures


def test_traces_have_a_row_per_frequency_and_a_column_per_swap():
    table = traces()
    figure = figures.attention_traces(table)
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
