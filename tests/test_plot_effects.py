"""Figures of ablations: every head and offset is drawn where the table says."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import FancyArrowPatch
from matplotlib.text import Text
from test_plot_display import CURVE, EDGES

from tlspectral import plots
from tlspectral.plots import ablation_effects, kernel

HEADS = pd.DataFrame({"layer": [0, 0, 1], "head": [0, 1, 0], "name": ["L0H0", "L0H1", "L1H0"], "prev": [0.9, 0.1, 0.5]})
EFFECTS = {"part": "rope_phase", "delta": [0.5, -0.1, np.nan], "delta_se": [0.1, 0.02, np.nan]}
SWEEP = HEADS[["layer", "head", "name"]].assign(**EFFECTS)


def test_effects_are_sorted_beside_their_control_and_unmeasured_heads_left_out():
    (axes,) = ablation_effects(SWEEP, HEADS).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["L0H1  (prev 0.10)", "L0H0  (prev 0.90)"]
    assert axes.containers[0][0].get_xdata().tolist() == [-0.1, 0.5]
    assert axes.get_xlabel() == "change of the loss (nats), bars: one standard error over sequences"
    (axes,) = ablation_effects(SWEEP.assign(delta_se=np.nan), HEADS).axes  # of one prompt
    assert axes.get_xlabel() == "change of the loss (nats)"
    controlled = SWEEP.assign(control_delta=[0.2, 0.0, np.nan], control_delta_se=[0.1, 0.1, np.nan])
    for part, said in (("rope_phase", "random part of equal size removed"), ("output", "the same of other heads")):
        (axes,) = ablation_effects(controlled.assign(part=part), HEADS).axes
        _, control = axes.containers
        assert control[0].get_xdata().tolist() == [0.0, 0.2]
        assert said in control.get_label()


@pytest.mark.parametrize("with_ablated", [False, True])
def test_one_panel_per_head_and_one_line_per_state(with_ablated):
    offsets = np.tile(np.arange(-3, 1), 2)
    intact = pd.DataFrame({"layer": 2, "head": np.repeat([1, 5], 4), "offset": offsets, "score": np.arange(8.0)})
    panels = kernel(intact, intact.assign(score=-intact["score"]) if with_ablated else None).axes
    assert [axes.get_title() for axes in panels] == ["L2H1", "L2H5"]
    for start, axes in zip((0, 4), panels, strict=True):
        scores = list(range(start, start + 4))
        expected = [scores, [-score for score in scores]][: 1 + with_ablated]
        assert [line.get_ydata().tolist() for line in axes.lines] == expected


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
