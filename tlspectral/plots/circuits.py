"""Figures of circuits: their edges as a graph or matrix, and the share of a behaviour that they carry by size."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Rectangle
from matplotlib.path import Path

from tlspectral.errors.settings import checked_settings
from tlspectral.plots.labels import name_points
from tlspectral.plots.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE,
    colour_bar,
    dress,
    legend_below,
    one_panel,
    two_decimals,
    two_sided_colours,
)
from tlspectral.tables.schema import require

_MOST_EDGES = 40
_MATRIX_FROM = 25  # edges; more lines than this cannot be followed by eye
_MOST_IN_ROW = 10  # boxes; more do not fit side by side in a page column with letters of 9 pixels
_WIDEST = 8.4  # inches
_NUMBERED = 5
_HALF_ROW = 0.24  # half the height of a box, as a share of the distance between rows
_NODE = re.compile(r"L(\d+)(?:H(\d+)|KV(\d+)|MLP)")
_STROKES: dict[str, Any] = {"q": "-", "k": (0, (8, 3)), "v": (0, (1.5, 2))}
"""Line style by what the receiver reads; dashes and gaps are in points, whatever the width of the line."""
_ASIDE = {"q": -0.4, "k": 0.0, "v": 0.4}  # shift of a line's end to the side, in half boxes
_LANE = 0.15  # distance between lines that pass a row at the same place, in half boxes
_UNSCALED: Any = {"lines.scale_dashes": False}


def faithfulness(table: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Draw how much of a behaviour circuits carry (up) against how many edges they keep (across, logarithmic).

    >>> import pandas as pd, tlspectral as tls
    >>> columns = {"circuit": "edges", "share": [0.1, 1], "n_edges": [20, 200]}
    >>> table = pd.DataFrame({**columns, "faithfulness": [0.7, 1]})
    >>> tls.plots.faithfulness(table).axes[0].get_ylabel()
    'share of the gap carried'

    Use it to see how small a circuit can be. The gap is the metric of the whole model minus the metric without any
    edge; 0 means nothing carried, 1 the whole model. The line is the circuits of the largest edges, its band a 95 %
    interval over pairs of prompts. Crosses are random edges between the same layers; circles are the same edges with
    the heads of each layer exchanged. With `choose="bootstrap"` in `tls.faithfulness`, pale points are circuits chosen
    on samples of pairs, and the line is measured on pairs outside the sample.

    Args:
        table: result of `tls.faithfulness`. Needed columns: `circuit, share, n_edges, faithfulness`; used if present:
            `low, high, worst, unseen`, and `table.attrs["n_pairs"]` for a note.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure; across: share of all edges that are kept; up: share of the gap, which may exceed 1.

    Raises:
        ValueError: a column is missing, or the table has no rows.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: that the model uses these edges. If random circuits lie on the line, any circuit of this size
    carries as much.
    """
    require(table, ("circuit", "share", "n_edges", "faithfulness"), "faithfulness")
    figure, axes = one_panel(ax, 5.6, 3.8)
    for height in (0.0, 1.0):
        axes.axhline(height, color=PALE, linewidth=0.8, zorder=1)
    handles = []
    for circuit, colour, mark in (("random", GREY, "x"), ("relabelled", ORANGE, "o")):
        points = table[table["circuit"] == circuit]
        if len(points):
            look = {"color": colour, "linestyle": "none", "markersize": 4, "markerfacecolor": "none", "gid": circuit}
            (drawn,) = axes.plot(points["share"], points["faithfulness"], mark, **look)  # pyright: ignore
            handles.append((drawn, "random edges, same layers" if circuit == "random" else "heads exchanged"))
    edges, line_label = table.loc[table["circuit"] == "edges"].sort_values("share"), "largest edges"
    if (of_procedure := table["circuit"] == "procedure").any():
        axes.plot(edges["share"], edges["faithfulness"], ".", color=BLUE, alpha=0.4, markersize=4, gid="samples")
        edges, line_label = table.loc[of_procedure].sort_values("share"), "chosen without the pair"
    (line,) = axes.plot(edges["share"], edges["faithfulness"], "o-", color=BLUE, markersize=4, gid="edges", zorder=4)
    if {"low", "high"} <= set(edges):
        axes.fill_between(edges["share"], edges["low"], edges["high"], color=BLUE, alpha=0.15, linewidth=0)
    lines = [(line, line_label)]
    if "worst" in edges and edges["worst"].notna().any():
        (worst,) = axes.plot(edges["share"], edges["worst"], ":", color=BLUE, linewidth=1, gid="worst")
        lines.append((worst, f"if unseen pairs ({edges['unseen'].max():.2f} of all) carried nothing"))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("share of all edges that are kept")
    axes.set_ylabel("share of the gap carried")
    dress(axes)
    band = ", band: 95 % over pairs" if {"low", "high"} <= set(edges) and edges["low"].notna().any() else ""
    note = f"{table.attrs['n_pairs']} pairs{band}" if "n_pairs" in table.attrs else None
    legend_below(figure, [*lines, *handles], [note], columns=3 if len(lines) == 1 else 2, ax=ax)
    return figure


@checked_settings
def circuit(edges: pd.DataFrame, *, most: int = _MOST_EDGES, ax: Axes | None = None) -> Figure:
    """Draw the largest edges of a circuit: up to 24 as a graph, 25 or more as a matrix of senders and receivers.

    >>> import pandas as pd, tlspectral as tls
    >>> ends = {"sender": ["L0H1", "L0H3"], "receiver": ["L1H0.k", "L1H2.q"]}
    >>> figure = tls.plots.circuit(pd.DataFrame({**ends, "delta": [-0.8, 0.3]}))
    >>> figure.legends[0].get_title().get_text()
    'the 2 largest of 2 edges'

    Use it to read a table of `tls.edge_effects`, where an edge is what one head or MLP writes into the input of
    another. The graph runs from the embedding at the bottom to the logits at the top, with a row of boxes per layer; a
    graph with more than 10 boxes in a row is drawn as a matrix. Line width is the size of the effect, colour its sign
    (blue: cutting the edge lowers the metric), and line style what the receiver reads: queries, keys or values. The
    five largest edges show their effect and the letter q, k or v. A frame joins heads that share keys or values. In the
    matrix, senders and receivers are in layer order, and colour is the effect.

    Args:
        edges: table with the columns `sender` ("L0H1"), `receiver` ("L1H0.k") and `delta` or `estimate`. Where `delta`
            is missing, `estimate` is drawn.
        most: number of edges to draw, largest absolute effect first. Default: 40.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure. Effects are changes of the metric when the edge is cut, in the metric's unit: nats for a
        loss, logits for a logit difference, probability for attention.

    Raises:
        ValueError: a column is missing, or no edge has an effect.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: that edges outside the figure do not matter, or that the drawn edges together have the sum of their
    effects. `tls.faithfulness` measures both.
    """
    require(edges, ("sender", "receiver"), "edge_effects")
    effect = edges["delta"] if "delta" in edges else edges["estimate"]
    effect = effect.fillna(edges["estimate"]) if "estimate" in edges else effect
    shown = edges.assign(effect=effect.astype(float)).dropna(subset="effect")
    shown = shown.sort_values("effect", key=np.abs, ascending=False).head(most)
    if shown.empty:
        raise ValueError("no edge has an effect: give edges with a delta or an estimate")
    note = f"the {len(shown)} largest of {len(edges)} edges"
    if len(shown) >= _MATRIX_FROM or _most_in_row(shown) > _MOST_IN_ROW:
        return _matrix(shown, note, ax)
    return _graph(shown, note, ax)


def _most_in_row(shown: pd.DataFrame) -> int:
    """Return the number of boxes in the fullest row of the graph of these edges."""
    ends = shown["receiver"].str.split(".").str[0]
    rows = Counter(y for _, y in _places([*shown["sender"], *ends], _groups(shown, ends)).values())
    return max(rows.values())


def _matrix(shown: pd.DataFrame, note: str, ax: Axes | None) -> Figure:
    """Return a figure (new, or the figure of `ax`) with edges as coloured cells: senders across, receivers down from
    the logits, colour their effect.

    `shown` has the columns sender, receiver and effect. `note` is a line of text below the panel.
    """
    across = sorted(shown["sender"].unique(), key=_order)
    down = sorted(shown["receiver"].unique(), key=_order, reverse=True)
    values = shown.pivot_table(index="receiver", columns="sender", values="effect", aggfunc="sum")
    values = values.reindex(index=down, columns=across).to_numpy(float)
    cell = min(0.19, (_WIDEST - 2.6) / len(across))
    figure, axes = one_panel(ax, 2.6 + cell * len(across), 1.9 + cell * len(down))
    reach = float(np.nanmax(np.abs(values))) or 1.0
    colours = two_sided_colours(reach)
    every = int(
        np.ceil(10 / (72 * cell))
    )  # a label of 8 points needs 10 points; where cells are smaller some have none
    look = {"edgecolors": PALE, "linewidth": 0.3, "cmap": colours.cmap, "norm": colours.norm}
    axes.pcolormesh(np.ma.masked_invalid(values), gid="edges", **look)
    axes.set_xticks(np.arange(0, len(across), every) + 0.5, across[::every], rotation=90)
    axes.set_yticks(np.arange(0, len(down), every) + 0.5, down[::every])
    axes.set(xlabel="sender", ylabel="receiver", ylim=(len(down), 0))
    dress(axes)
    axes.tick_params(labelsize=8)
    colour_bar(figure, colours, axes, "change of the metric when it is cut", whole=False)
    legend_below(figure, [], [note], ax=ax)
    return figure


def _graph(shown: pd.DataFrame, note: str, ax: Axes | None) -> Figure:
    """Return a figure (new, or the figure of `ax`) with edges as lines between boxes, with a row of boxes per layer.

    `shown` has the columns sender, receiver and effect. `note` is a line of text below the panel.
    """
    ends = shown["receiver"].str.split(".").str[0]
    groups = _groups(shown, ends)
    framed = {name: [head for head in heads if head in {*shown["sender"], *ends}] for name, heads in groups.items()}
    framed = {name: heads for name, heads in framed.items() if heads}
    places = _places([name for name in (*shown["sender"], *ends) if name not in framed], groups)
    solid = [*places.values()]
    height = max(y for _, y in solid)
    most_in_row = max(Counter(y for _, y in solid).values())
    half = min(0.11, 0.8 / (most_in_row + 1))  # of a box, in units of the axes
    for name, heads in framed.items():
        across, row = [places[head][0] for head in heads], places[heads[0]][1]
        places[name] = (min(across) + max(across)) / 2, row
        solid += [(x, row) for x in np.arange(min(across), max(across), half)]
    figure, axes = one_panel(ax, max(6.4, 0.84 * most_in_row), 1.7 + 0.6 * height)
    axes.set(xlim=(-1.1, 1.1), ylim=(-0.7, height + 0.7))
    axes.axis("off")
    largest = float(shown["effect"].abs().max()) or 1.0
    middles, along, uncovered = [], [], []
    lanes: dict[int, list[float]] = {}
    reads = shown["receiver"].str.partition(".")[2]
    for (_, row), end, read in zip(shown.iterrows(), ends, reads, strict=True):
        colour, width = BLUE if row["effect"] < 0 else ORANGE, 0.4 + 2.6 * abs(row["effect"]) / largest
        # Edges into the queries, keys and values of one box end side by side.
        (x, y), aside = places[str(end)], half * _ASIDE.get(read, 0.0)
        path = _between_boxes(places[str(row["sender"])], (x + aside, y), solid, half, lanes)
        points = np.asarray(path.vertices)
        with rc_context(_UNSCALED):
            arrow = FancyArrowPatch(path=path, arrowstyle="-|>", mutation_scale=8, color=colour, linewidth=width,
                linestyle=_STROKES.get(read, "-"), capstyle="butt", gid="edge")  # fmt: skip
        axes.add_patch(arrow)
        middles.append(points[[0, min(3, len(points) - 1)]].mean(0))  # the middle of the curve's first piece
        along.append(Path(np.asarray(path.cleaned(curves=False).vertices)[:-1]).interpolated(4).vertices)
        uncovered.append(points[-1] - np.linspace(0.0, 0.2, 4)[:, None] * (0.0, 1.0))  # the arrow's head
    for name, heads in framed.items():
        across, y = [places[head][0] for head in heads], places[name][1]
        corner, size = (
            (min(across) - half, y - 0.9 * _HALF_ROW),
            (max(across) - min(across) + 2 * half, 1.8 * _HALF_ROW),
        )
        axes.add_patch(Rectangle(corner, *size, fill=False, edgecolor=GREY, linewidth=0.8, gid=f"group {name}"))
        label = name[name.index("KV") :]
        axes.text(corner[0], y + 0.9 * _HALF_ROW, label, va="bottom", fontsize=8, color=INK, zorder=5, gid="group")
    for name, (x, y) in places.items():
        if name in framed:
            continue
        box = {"boxstyle": "square,pad=0.25" if name.endswith("MLP") else "round,pad=0.25", "fc": "white", "ec": GREY}
        axes.text(x, y, name, ha="center", va="center", fontsize=8, color=INK, bbox=box, zorder=5, gid="node")
    handles = [(Line2D([], [], color=colour), text) for colour, text in (
        (BLUE, "cutting it lowers the score"), (ORANGE, "raises it"))]  # fmt: skip
    with rc_context(_UNSCALED):
        look: dict[str, Any] = {"color": INK, "linewidth": 2.0, "dash_capstyle": "butt"}
        handles += [(Line2D([], [], linestyle=dash, **look), f"into {side}") for side, dash in _STROKES.items()]
        legend_below(figure, handles, [note], columns=5, ax=ax)
    numbers = [f"{two_decimals(effect)} {read}".strip() for effect, read in zip(shown["effect"], reads, strict=True)]
    boxes = [(x + side * half, y + up * _HALF_ROW) for x, y in places.values()
             for side in np.linspace(-1.0, 1.0, 5) for up in (-0.7, 0.0, 0.7)]  # fmt: skip
    numbers, colours = numbers[:_NUMBERED], [INK] * len(numbers[:_NUMBERED])
    name_points(figure, axes, numbers, np.array(middles[:_NUMBERED]), np.concatenate(along), colours=colours,
        gid="effect", clear=np.concatenate([*uncovered, boxes]))  # fmt: skip
    return figure


def _groups(shown: pd.DataFrame, ends: pd.Series) -> dict[str, list[str]]:
    """Return a dict from a group of heads with common keys or values, such as "L18KV2", to the names of its heads.

    `shown` are edges; `ends` are their receivers without the input, such as "L18KV2". Heads of a group are those that
    its edge reaches, from the column `reached`. The dict is empty if `shown` has no column `reached`.
    """
    if "reached" not in shown:
        return {}
    of_group = dict(zip(ends, shown["reached"], strict=True))
    return {name: str(heads).split(", ") for name, heads in of_group.items() if _NODE.match(name) and "KV" in name}


def _between_boxes(
    start: tuple[float, float],
    end: tuple[float, float],
    boxes: list[tuple[float, float]],
    half: float,
    lanes: dict[int, list[float]],
) -> Path:
    """Return a matplotlib Path, a curve from the top of the box at `start` to the bottom of the box at `end`, which
    avoids the boxes of the rows between.

    `start`, `end` and `boxes` are centres (x, row), `half` is half the width of a box, all in units of the axes.
    `lanes` is a dict from a row to the positions where earlier lines pass it; the positions of this line are added.
    """
    if end[1] <= start[1]:  # within a row or downwards: a straight line
        return Path([start, end])
    points = [(start[0], start[1] + _HALF_ROW)]
    for row in range(int(start[1]) + 1, int(end[1])):
        straight = start[0] + (end[0] - start[0]) * (row - start[1]) / (end[1] - start[1])
        in_row = [place for place, height in boxes if height == row]
        x = _nearest_gap(straight, in_row, 1.25 * half, lanes.get(row, []), _LANE * half)
        lanes.setdefault(row, []).append(x)
        points += [(x, row - _HALF_ROW), (x, row + _HALF_ROW)]
    points.append((end[0], end[1] - _HALF_ROW))
    vertices, codes = [points[0]], [Path.MOVETO]
    for low, high in zip(points[::2], points[1::2], strict=True):
        middle = (low[1] + high[1]) / 2  # control points at half height make the curve vertical at both rows
        vertices += [(low[0], middle), (high[0], middle), high]
        codes += [Path.CURVE4] * 3
        if high != points[-1]:
            vertices.append((high[0], high[1] + 2 * _HALF_ROW))
            codes.append(Path.LINETO)
    return Path(vertices, codes)


def _nearest_gap(x: float, boxes: list[float], half: float, taken: list[float], lane: float) -> float:
    """Return the horizontal position nearest to `x` that is at least `half` away from the centre of every box of a row;
    `boxes` are these centres.

    The position is also at least `lane` away from the lines at `taken`, if there is room within four lanes.
    """
    free = [place for place in (x, *(box + side * half for box in boxes for side in (-1.0, 1.0)))
            if all(abs(place - box) >= half - 1e-9 for box in boxes)]  # fmt: skip
    beside = [place + step * lane for place in free for step in range(-4, 5)]
    apart = [place for place in beside if all(abs(place - box) >= half - 1e-9 for box in boxes)
             and all(abs(place - line) >= lane - 1e-9 for line in taken)]  # fmt: skip
    return min(apart or free, key=lambda place: abs(place - x))


def _order(name: str) -> tuple[int, int, int, str]:
    """Return a sort key for the name of a sender or receiver, such as "L3H2.k": by layer, heads before MLPs, the
    embedding first, the logits last.
    """
    match = _NODE.match(name)
    if match is None:
        return (-1, 0, 0, name) if name.startswith("embedding") else (10**6, 0, 0, name)
    return int(match[1]), int("MLP" in name), int(match[2] or match[3] or 0), name


def _places(names: list[str], groups: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    """Return a dict from each node (head, MLP, group, embedding, logits) to its place (x from -1 to 1, row number).

    Rows are in layer order, MLPs in a row above the heads of their layer; nodes of a row are evenly spaced. `groups`
    maps a group such as "L18KV2" to its heads; a group among `names` stands where its first head would stand.
    """
    rows: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for name in dict.fromkeys(names):
        match = _NODE.fullmatch(groups[name][0] if name in groups else name)
        if match is None:
            rows.setdefault((-1, 0) if name == "embedding" else (10**6, 0), []).append((0, name))
        else:
            place = match[2] or match[3] or 0
            rows.setdefault((int(match[1]), int(name.endswith("MLP"))), []).append((int(place), name))
    return {
        name: ((index + 1) / (len(row) + 1) * 2 - 1, float(height))
        for height, (_, row) in enumerate(sorted(rows.items()))
        for index, (_, name) in enumerate(sorted(row))
    }
