"""The figure of one score: each bar is the row of the table, its parts end to end."""

import numpy as np
import pandas as pd
import pytest
from figure_parts import part, said
from plotted_tables import PARTS, terms

from tlspectral.plots import qk_attribution

pytestmark = pytest.mark.lowest


def bars(figure, name):
    """Left end and length of the bars of a part, top to bottom."""
    patches = sorted(part(figure, name), key=lambda bar: -bar.get_y())
    return np.array([(bar.get_x(), bar.get_width()) for bar in patches])


def test_bars_are_the_parts_stacked_away_from_zero():
    table = terms()
    figure = qk_attribution(table)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"embedding × L0H{index}" for index in range(5)]  # noqa: RUF001
    ends = {"right": np.zeros(5), "left": np.zeros(5)}
    for name in PARTS:
        start, length = bars(figure, name).T
        np.testing.assert_allclose(length, table[name])
        side = np.where(table[name] >= 0, ends["right"], ends["left"])
        np.testing.assert_allclose(start, side)
        ends["right"] += length.clip(min=0)
        ends["left"] += length.clip(max=0)
    (dots,) = part(figure, "total")
    np.testing.assert_allclose(dots.get_xdata(), table["total"])
    assert "logits" in axes.get_xlabel()
    assert axes.get_title(loc="left") == "L5H1: ' be' (7) to ' or' (2), score \N{MINUS SIGN}1.50"
    assert not part(figure, "measured")
    measured = [0.5, -0.5, np.nan, np.nan, np.nan]
    (rings,) = part(qk_attribution(terms(measured=measured)), "measured")
    np.testing.assert_array_equal(rings.get_xdata(), measured)


def test_small_terms_are_counted_and_the_rest_is_last():
    table = terms(20)
    last = pd.DataFrame({"query_term": ["rest"], "key_term": ["rest"], **dict.fromkeys([*PARTS, "total"], 0.25)})
    figure = qk_attribution(pd.concat([table, last], ignore_index=True))
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert len(labels) == 17
    assert labels[-1] == "rest"
    left_out = f"{table['total'][16:].sum():.2f}".replace("-", "\N{MINUS SIGN}")
    assert f"4 smaller terms are not drawn; they sum to {left_out}" in said(figure)
    assert "not drawn" not in said(qk_attribution(terms(3)))


def test_several_scores_and_features_are_said_in_the_title():
    table = terms()
    table.attrs |= {"n_prompts": 3, "n_distinct": 3, "query": [1, 2, 3], "error_score": 0.25}
    assert (
        qk_attribution(table).axes[0].get_title(loc="left") == "L5H1: mean of 3 scores, \N{MINUS SIGN}1.50, error 0.25"
    )
    table.attrs["n_distinct"] = 2
    assert "mean of 3 scores (2 distinct), " in qk_attribution(table).axes[0].get_title(loc="left")


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_no_dot_is_cut_by_the_edge(sign):
    table = terms()
    for name in [*PARTS, "total"]:  # all terms of one sign, the smallest near 0, as by="frequency" has them
        table[name] = sign * np.array([5.0, 3.0, 1.0, 0.1, 0.0])
    figure = qk_attribution(table)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (dots,) = part(figure, "total")
    box, radius = axes.get_window_extent(), dots.get_markersize() / 2 * figure.dpi / 72
    for place in axes.transData.transform(dots.get_xydata()):
        assert box.x0 + radius < place[0] < box.x1 - radius
        assert box.y0 + radius < place[1] < box.y1 - radius
