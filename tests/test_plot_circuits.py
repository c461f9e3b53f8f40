"""Figures of circuits: which edges are drawn, how wide, and every circuit of a curve as a point."""

import numpy as np
import pytest
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text
from test_plot_display import CURVE, EDGES

from tlspectral import plots


def drawn(figure, kind, gid):
    return [artist for artist in figure.findobj(kind) if artist.get_gid() == gid]


def test_the_largest_edges_are_drawn_by_size_and_sign():
    figure = plots.circuit(EDGES, most=4)
    edges = drawn(figure, FancyArrowPatch, "edge")
    sizes = np.array([3.1, 1.9, 0.9, 0.5])  # measured where they are, else estimated; the fifth is left out
    widths = np.array([edge.get_linewidth() for edge in edges])
    np.testing.assert_allclose((widths - 0.4) / 2.6, sizes / 3.1)
    colours = [edge.get_edgecolor()[:3] for edge in edges]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    nodes = {text.get_text(): text.get_position() for text in drawn(figure, Text, "node")}
    assert set(nodes) == {"embedding", "L0MLP", "L0H2", "L1KV0", "L1H0", "logits"}
    heights = {name: place[1] for name, place in nodes.items()}
    assert heights["embedding"] < heights["L0H2"] < heights["L0MLP"] < heights["L1H0"] == heights["L1KV0"]
    assert max(heights, key=heights.get) == "logits"
    with pytest.raises(ValueError, match="no edges to draw"):
        plots.circuit(EDGES.assign(estimate=np.nan, delta=np.nan))


def test_every_circuit_of_a_curve_is_a_point():
    (axes,) = plots.faithfulness(CURVE).axes
    points = {line.get_gid(): np.column_stack(line.get_data()) for line in axes.lines if line.get_gid()}
    assert points["edges"].tolist() == [[0.01, 0.4], [0.1, 0.9]]
    assert points["random"].tolist() == [[0.01, 0.0], [0.1, 0.3]]
    assert points["relabelled"].tolist() == [[0.01, 0.1], [0.1, 0.5]]
    assert axes.get_xscale() == "log"
