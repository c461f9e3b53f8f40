"""Every figure is legible, shows itself in a notebook, and one of a single panel draws into axes that are given."""

import io
import sys
import warnings

import made_up_heads
import made_up_walls
import numpy as np
import pandas as pd
import plotted_tables
import pytest
import torch
from figure_parts import part, said, small_texts
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation, Text
from plotted_tables import terms
from positional_tables import by_query, head_scores, joined, norms, per_frequency, traces
from tlspectral_studies.positional_symbolic import figures
from zoo import shared

from tlspectral import plots
from tlspectral.plots.style import one_panel, two_decimals

pytestmark = pytest.mark.lowest

# What draws each, and words that it shows; those of one panel take axes.
EDGES = pd.DataFrame({
    "sender": ["embedding", "L0MLP", "L0H2", "L0H2", "L1H0"],
    "receiver": ["L0MLP", "L1H0.q", "L1KV0.k", "L1KV0.v", "logits"],
    "estimate": [-2.0, 0.5, -0.1, 1.0, -3.0], "delta": [-1.9, np.nan, -0.2, 0.9, -3.1],
})  # fmt: skip
CURVE = pd.DataFrame({
    "circuit": ["edges", "random", "relabelled"] * 2, "share": [0.01] * 3 + [0.1] * 3, "n_edges": [1] * 3 + [10] * 3,
    "faithfulness": [0.4, 0.0, 0.1, 0.9, 0.3, 0.5], "low": [0.3, np.nan, np.nan, 0.8, np.nan, np.nan],
    "high": [0.5, np.nan, np.nan, 1.0, np.nan, np.nan],
})  # fmt: skip
DRAWS = [[0.1, 0.2, 0.3], [0.0] * 3, None]
CONTROLLED = plotted_tables.SWEEP.assign(control_p=[0.25, 1.0, np.nan], control_draws=DRAWS)
ONE_PANEL = {
    "circuit": (lambda **ax: plots.circuit(EDGES, **ax), "L1KV0"),
    "faithfulness": (lambda **ax: plots.faithfulness(CURVE, **ax), "share of the gap carried"),
    "ablation_effects": (
        lambda **ax: plots.ablation_effects(CONTROLLED, detectors=plotted_tables.HEADS, **ax), "control_p",
    ),
    "plane": (lambda **ax: plots.plane(plotted_tables.heads(), **ax), "antisymmetric"),
    "exclusion_plane": (lambda **ax: plots.exclusion_plane(head_scores(), **ax), "0 symbolic"),
    "heads": (lambda **ax: plots.heads(plotted_tables.heads(), "D_head_z", **ax), "layer"),
    "kernel": (lambda **ax: plots.kernel(plotted_tables.KERNELS.iloc[:4], **ax), "tokens"),
    "positional_symbolic_plane": (
        lambda **ax: plots.positional_symbolic_plane(head_scores(), highlight="L1H2", **ax), "(cosine)",
    ),
    "qk_attribution": (lambda **ax: plots.qk_attribution(terms(), **ax), "logits"),
}  # fmt: skip
OF_THE_STUDY = {
    "frequency_profile": (lambda: figures.frequency_profile(per_frequency(), [(0, 0), (1, 2), (3, 1)]), "(cosine)"),
    "score_heatmaps": (lambda: figures.score_heatmaps(head_scores()), "positional score"),
    "score_histograms": (lambda: figures.score_histograms(by_query()), "(cosine)"),
    "plane_by_query": (lambda: figures.plane_by_query(by_query()), "(cosine)"),
    "frequency_grid": (lambda **ax: figures.frequency_grid(per_frequency(), **ax), "score 0 to 1 up"),
    "frequency_path": (lambda **ax: figures.frequency_path(per_frequency(), (1, 1), **ax), "(cosine)"),
    "frequency_norms": (lambda: figures.frequency_norms(norms(), "L0H1"), "rms over keys"),
    "attention_traces": (lambda: figures.attention_traces(traces()), "mean attention per token"),
    "score_agreement": (lambda: figures.score_agreement(joined()), "(cosine)"),
    "exclusion_heatmap": (lambda: figures.exclusion_heatmap(head_scores()), "0 symbolic"),
    "exclusion_histograms": (lambda: figures.exclusion_histograms(by_query()), "0 symbolic"),
}
OF_A_MODEL = {
    "patterns": (
        lambda: plots.patterns(shared("bridge", "gpt2"), torch.arange(9), ["L0H1", "L1H0"]),
        "without the first",
    ),
    "eigenvalues": (lambda: plots.eigenvalues(shared("bridge", "gpt2"), ["L0H1", "L1H0"]), "draws of its null"),
    "rotary_plane": (
        lambda: plots.rotary_plane(shared("bridge", "llama"), "L0H1", 0, torch.arange(9), key=4),
        "after rotation",
    ),
    "wall": (
        lambda: plots.wall(made_up_walls.wall(tokens=[" a"] * 9), table=made_up_heads.heads()),
        "Each square is one head",
    ),
}
FIGURES = {**ONE_PANEL, **OF_A_MODEL, **OF_THE_STUDY}
SLOW = {name: pytest.param(name, marks=pytest.mark.slow) for name in OF_THE_STUDY}


def test_a_notebook_shows_every_figure():
    assert set(plots.__all__) == {*ONE_PANEL, *OF_A_MODEL}
    stream = FIGURES["kernel"][0]()._repr_png_()
    assert stream.startswith(b"\x89PNG")


def saved(figure):
    """The figure, after it was written without a warning and without a figure of pyplot."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # matplotlib 3.9 calls what pyparsing 3.3 deprecates.
        warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(matplotlib|pyparsing)\.")
        figure.savefig(stream, format="pdf")
    assert stream.getvalue().startswith(b"%PDF")
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    return figure


@pytest.mark.slow
@pytest.mark.parametrize("name", [SLOW.get(name, name) for name in FIGURES])
def test_texts_are_large_enough_inside_the_figure_and_not_on_one_another(name):
    draw, words = FIGURES[name]
    figure = saved(draw())
    figure.draw_without_rendering()
    assert hasattr(figure, "_repr_png_")
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    assert words in " ".join(text.get_text() for text in texts)
    assert min(text.get_fontsize() for text in texts if not isinstance(text, Annotation)) >= 8
    frame = figure.bbox.padded(1)
    names = [text for axes in figure.axes for text in (axes.xaxis.label, axes.yaxis.label, axes.title)]
    names += figure.texts
    for legend in figure.legends:
        names += [legend.get_title(), *legend.get_texts()]
    names = [text for text in names if text.get_text().strip() and text.get_visible()]
    boxes = [text.get_window_extent() for text in names]
    for text, box in zip(names, boxes, strict=True):
        assert frame.contains(*box.min), text
        assert frame.contains(*box.max), text
    for number, box in enumerate(boxes):
        for other in range(number):
            assert not box.padded(-1).overlaps(boxes[other].padded(-1)), (names[number], names[other])


@pytest.mark.parametrize("name", [SLOW.get(name, name) for name in FIGURES])
def test_no_letter_is_below_nine_pixels_in_a_page_column(name):
    assert small_texts(FIGURES[name][0]()) == {}


LARGE = {
    "patterns": lambda: plots.patterns(shared("bridge", "gpt2"), torch.arange(24), all_heads(12)),
    "eigenvalues": lambda: plots.eigenvalues(shared("bridge", "gpt2"), all_heads(6)),
    "kernel": lambda: plots.kernel(kernels_of(5)),
    "map": lambda: plots.heads(made_up_heads.heads(40, 128), "D_head"),
    "graph": lambda: plots.circuit(many_edges(2, 40), most=24),
    "matrix": lambda: plots.circuit(many_edges(3, 40), most=300),
}


def all_heads(count: int) -> list[str]:
    cfg = shared("bridge", "gpt2").cfg
    return [f"L{layer}H{head}" for layer in range(cfg.n_layers) for head in range(cfg.n_heads)][:count]


def kernels_of(count: int) -> pd.DataFrame:
    return pd.DataFrame({"layer": 0, "head": np.repeat(np.arange(count), 4), "offset": [-3, -2, -1, 0] * count,
        "score": np.random.default_rng(0).normal(size=4 * count)})  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_figures_of_many_heads_keep_their_letters_legible(name):
    assert small_texts(LARGE[name]()) == {}


def drawn(axes):
    return [len(artists) for artists in (axes.lines, axes.collections, axes.patches, axes.texts)]


@pytest.mark.fast(3)
@pytest.mark.parametrize("name", [*ONE_PANEL, SLOW["frequency_grid"], SLOW["frequency_path"]])
def test_given_axes_hold_what_a_figure_alone_holds(name):
    figure = Figure(figsize=(12, 6), layout="constrained")
    ax, neighbour = figure.subplots(1, 2)
    untouched = len(neighbour.findobj())
    draw, _ = FIGURES[name]
    alone = draw()
    assert draw(ax=ax) is figure
    # Alone the figure's own patch and legend stand outside of the axes; a colour bar may be axes of its own.
    assert len(figure.findobj()) - untouched == len(alone.findobj())
    assert drawn(ax) == drawn(alone.axes[0])
    assert ax.has_data()
    assert figure.legends == []
    assert len(neighbour.findobj()) == untouched


def test_axes_of_a_subfigure_serve_and_what_is_no_axes_is_refused():
    figure = Figure(layout="constrained")
    left, _ = figure.subfigures(1, 2)
    assert one_panel(left.subplots(), 1.0, 1.0)[0] is figure
    grid = Figure().subplots(1, 2)
    with pytest.raises(TypeError, match="ax= is a ndarray: give a matplotlib Axes"):
        one_panel(grid, 1.0, 1.0)
    with pytest.raises(ValueError, match="the kernels are of 2 heads: choose"):
        plots.kernel(plotted_tables.KERNELS, ax=grid[0])


def test_the_largest_edges_are_drawn_by_size_and_sign():
    figure = plots.circuit(EDGES, most=4)
    edges = part(figure, "edge")
    sizes = np.array([3.1, 1.9, 0.9, 0.5])  # measured where they are, else estimated; the fifth is left out
    widths = np.array([edge.get_linewidth() for edge in edges])
    np.testing.assert_allclose((widths - 0.4) / 2.6, sizes / 3.1)
    colours = [edge.get_edgecolor()[:3] for edge in edges]
    assert colours[0] == colours[1] != colours[2] == colours[3]
    (mesh,) = part(plots.circuit(many_edges(3, 3), most=25), "edges")
    assert {to_hex(colour) for colour in mesh.cmap([0.0, 1.0])} == {to_hex(colours[0]), to_hex(colours[2])}
    nodes = {text.get_text(): text.get_position() for text in part(figure, "node")}
    assert set(nodes) == {"embedding", "L0MLP", "L0H2", "L1KV0", "L1H0", "logits"}
    heights = {name: place[1] for name, place in nodes.items()}
    assert heights["embedding"] < heights["L0H2"] < heights["L0MLP"] < heights["L1H0"] == heights["L1KV0"]
    assert max(heights, key=heights.get) == "logits"
    with pytest.raises(ValueError, match="no edge has an effect"):
        plots.circuit(EDGES.assign(estimate=np.nan, delta=np.nan))


def many_edges(n_layers: int, n_heads: int):
    """Edges from every head to the queries of every later head, some of both signs."""
    rows = [(f"L{low}H{one}", f"L{high}H{other}.q") for high in range(n_layers) for low in range(high)
            for one in range(n_heads) for other in range(n_heads)]  # fmt: skip
    effects = np.random.default_rng(0).normal(size=len(rows))
    return pd.DataFrame(rows, columns=["sender", "receiver"]).assign(delta=effects)


@pytest.mark.slow
def test_lines_pass_between_boxes_and_the_largest_have_their_number():
    edges = many_edges(6, 4)
    figure = plots.circuit(edges, most=24)
    figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_bbox_patch().get_window_extent() for text in part(figure, "node")}
    (axes,) = figure.axes
    largest = edges.sort_values("delta", key=np.abs, ascending=False).head(24)
    crossed = []
    for line, (_, row) in zip(part(figure, "edge"), largest.iterrows(), strict=True):
        points = axes.transData.transform(line._path_original.cleaned(curves=False).vertices[:-1])
        ends = {row["sender"], row["receiver"].removesuffix(".q")}
        crossed += [name for name, box in boxes.items() if name not in ends and box.count_contains(points)]
    assert crossed == []
    numbers = [text.get_text() for text in part(figure, "effect")]
    assert numbers == [f"{two_decimals(effect)} q" for effect in largest["delta"].iloc[:5]]


def test_strokes_have_the_dashes_of_the_legend_whatever_their_width():
    edges = pd.DataFrame({
        "sender": ["L0H0", "L0H0", "L0H0", "L0H1", "L0H1"],
        "receiver": ["L1H0.q", "L1H0.k", "L1H0.v", "L1H0.v", "logits"],
        "delta": [3.0, -2.0, 1.0, 0.01, -0.5],
    })  # fmt: skip
    figure = plots.circuit(edges)
    drawn = dict(zip(["q", "k", "v", "thin v", "logits"], sorted_edges(figure, edges), strict=True))
    dashes = {name: line._dash_pattern[1] for name, line in drawn.items()}
    assert dashes["q"] is dashes["logits"] is None
    assert tuple(dashes["v"]) == tuple(dashes["thin v"]) != tuple(dashes["k"])
    assert {line.get_capstyle() for line in drawn.values()} == {"butt"}
    (legend,) = figure.legends
    entries = dict(zip([text.get_text() for text in legend.get_texts()], legend.get_lines(), strict=True))
    for name in ("k", "v"):
        assert tuple(entries[f"into {name}"]._dash_pattern[1]) == tuple(dashes[name])
        assert entries[f"into {name}"].get_dash_capstyle() == "butt"
    ends = [drawn[name]._path_original.vertices[-1][0] for name in "qkv"]
    assert ends[0] < ends[1] < ends[2]  # side by side, so that no two colours lie on one another
    assert {text.get_text()[-2:] for text in part(figure, "effect")} >= {" q", " k", " v"}


def sorted_edges(figure, edges):
    """Lines of the edges, in the order of the table."""
    order = edges["delta"].abs().sort_values(ascending=False).index
    lines = dict(zip(order, part(figure, "edge"), strict=True))
    return [lines[row] for row in edges.index]


@pytest.mark.parametrize("edges", [EDGES, pd.DataFrame({
    "sender": ["embedding", "L0MLP", "L0MLP", "L1H0", "L1H1"],
    "receiver": ["L0MLP", "L1H0.k", "L1H0.v", "logits", "L1MLP"], "delta": [-7.5, 1.0, -2.0, 3.0, 2.5],
})])  # fmt: skip
def test_no_number_covers_the_head_of_an_arrow_or_a_box(edges):
    figure = plots.circuit(edges)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    tips = [axes.transData.transform(line._path_original.vertices[-1]) for line in part(figure, "edge")]
    tips = np.concatenate([tips, np.array(tips) - (0.0, 4.0)])
    boxes = [node.get_bbox_patch().get_window_extent().get_points().mean(0) for node in part(figure, "node")]
    for number in part(figure, "effect"):
        assert not Text.get_window_extent(number).count_contains([*tips, *boxes]), number.get_text()


def test_lines_that_pass_a_row_do_not_lie_on_one_another():
    edges = pd.DataFrame({
        "sender": ["embedding", "L0MLP", "embedding", "L0MLP"], "receiver": ["L0MLP", "L1H0.q", "logits", "logits"],
        "delta": [3.0, -2.0, 1.0, -0.5],
    })  # fmt: skip
    lines = sorted_edges(plots.circuit(edges), edges)
    low = 2 - 0.24  # the row of L1H0, which both lines to the logits pass
    places = [{x for x, y in line._path_original.vertices if abs(y - low) < 1e-6} for line in lines[2:]]
    (one,), (other,) = places
    assert abs(one - other) > 0.01


def test_heads_that_share_keys_stand_in_one_box_and_lines_go_around_it():
    edges = pd.DataFrame({
        "sender": ["embedding", "embedding", "L2H1", "L2H3", "L0H1", "embedding"],
        "receiver": ["L2KV1.k", "L0H1.q", "logits", "logits", "logits", "L3KV0.v"],
        "reached": ["L2H1, L2H2, L2H3", "L0H1", "", "", "", "L3H0, L3H1"],
        "delta": [3.0, 1.0, 2.0, 1.5, -1.0, 0.5],
    })  # fmt: skip
    figure = plots.circuit(edges)
    nodes = {text.get_text(): np.array(text.get_position()) for text in part(figure, "node")}
    assert set(nodes) == {"embedding", "L0H1", "L2H1", "L2H3", "L3KV0", "logits"}  # L3KV0 has no head that is drawn
    (frame,) = part(figure, "group L2KV1")
    low, high = frame.get_bbox().get_points()
    for name, place in nodes.items():
        assert (np.all(low < place) and np.all(place < high)) == (name in ("L2H1", "L2H3"))
    assert [text.get_text() for text in part(figure, "group")] == ["KV1"]
    lines = dict(zip(edges.sort_values("delta", key=np.abs, ascending=False).index, part(figure, "edge"), strict=True))
    end = lines[0]._path_original.vertices[-1]
    assert low[0] < end[0] < high[0]
    assert end[1] == pytest.approx(nodes["L2H1"][1] - 0.24)
    path = lines[4]._path_original.cleaned(curves=False).vertices[:-1]  # of L0H1, in the middle, to the logits
    assert not np.any(np.all((low < path) & (path < high), axis=1))


def test_from_25_edges_on_senders_and_receivers_are_a_matrix_in_the_order_of_layers():
    edges = many_edges(3, 3)
    figure = plots.circuit(edges, most=25)
    (mesh,) = part(figure, "edges")
    axes = mesh.axes
    across, down = (
        [label.get_text() for label in labels] for labels in (axes.get_xticklabels(), axes.get_yticklabels())
    )
    assert across == sorted(across)
    assert down == sorted(down, reverse=True)
    values = np.ma.filled(mesh.get_array(), np.nan).reshape(len(down), len(across))
    shown = edges.sort_values("delta", key=np.abs, ascending=False).head(25)
    expected = np.full(values.shape, np.nan)
    for _, row in shown.iterrows():
        expected[down.index(row["receiver"]), across.index(row["sender"])] = row["delta"]
    np.testing.assert_array_equal(values, expected)
    assert mesh.norm.vmax == -mesh.norm.vmin == shown["delta"].abs().max()


def test_every_circuit_of_a_curve_is_a_point():
    (axes,) = plots.faithfulness(CURVE).axes
    points = {line.get_gid(): np.column_stack(line.get_data()) for line in axes.lines if line.get_gid()}
    assert points["edges"].tolist() == [[0.01, 0.4], [0.1, 0.9]]
    assert points["random"].tolist() == [[0.01, 0.0], [0.1, 0.3]]
    assert points["relabelled"].tolist() == [[0.01, 0.1], [0.1, 0.5]]
    assert axes.get_xscale() == "log"
    figure = plots.faithfulness(CURVE.assign(unseen=0.312, worst=CURVE["low"] * 0.688))
    (line,) = part(figure, "worst")
    np.testing.assert_allclose(line.get_ydata(), [0.3 * 0.688, 0.8 * 0.688])
    assert "if unseen pairs (0.31 of all) carried nothing" in said(figure)


def test_the_line_of_a_procedure_is_not_that_of_its_samples():
    samples = CURVE[CURVE["circuit"] == "edges"].drop(columns=["low", "high"])
    mean = samples.assign(circuit="procedure", faithfulness=[0.3, 0.8])
    table = pd.concat([samples, samples.assign(faithfulness=[0.2, 0.7], draw=1), mean])
    figure = plots.faithfulness(table)
    (line,), (points,) = part(figure, "edges"), part(figure, "samples")
    assert line.get_ydata().tolist() == [0.3, 0.8]
    assert sorted(points.get_ydata()) == [0.2, 0.4, 0.7, 0.9]
    assert "chosen without the pair" in said(figure)
