"""Figures of circuits: their edges as a graph, and how much of a behaviour they carry over their number."""

import re
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch

from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, PALE, dress, legend_below, one_panel
from tlspectral.tables.schema import require

_MOST_EDGES = 40
_NODE = re.compile(r"L(\d+)(?:H(\d+)|KV(\d+)|MLP)")
_INPUTS: dict[str, Any] = {"q": "-", "k": "--", "v": ":"}


def faithfulness(table: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Share of a behaviour that circuits carry, over the share of edges that they keep, on a logarithmic axis.

    Args:
        table: of `faithfulness`. Every relabelled and random circuit is a point.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a missing column.

    What it does not establish: that the edges are those which the model uses. Points on the line say that any circuit
    of that size carries as much.
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
    edges = table.loc[table["circuit"] == "edges"].sort_values("share")
    (line,) = axes.plot(edges["share"], edges["faithfulness"], "o-", color=BLUE, markersize=4, gid="edges", zorder=4)
    if {"low", "high"} <= set(edges):
        axes.fill_between(edges["share"], edges["low"], edges["high"], color=BLUE, alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_xlabel("share of all edges that are kept")
    axes.set_ylabel("share of the score gap carried")
    dress(axes)
    note = f"{table.attrs['n_pairs']} pairs, band: 95 % over pairs" if "n_pairs" in table.attrs else None
    legend_below(figure, [(line, "largest edges"), *handles], [note], columns=3, ax=ax)
    return figure


def circuit(edges: pd.DataFrame, *, most: int = _MOST_EDGES, ax: Axes | None = None) -> Figure:
    """Edges of a circuit from the embedding at the bottom to the logits at the top, a row for the heads of a layer.

    The width of a line is the size of the effect, its colour the sign, its stroke what of a head is read: queries,
    keys or values. Heads that share keys or values are reached by one line each.

    Args:
        edges: a table with `sender`, `receiver` and `delta` or `estimate`, such as one of `edge_effects`.
        most: how many edges are drawn, the largest.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a missing column, or no edges.
    """
    require(edges, ("sender", "receiver"), "edge_effects")
    effect = edges["delta"] if "delta" in edges else edges["estimate"]
    effect = effect.fillna(edges["estimate"]) if "estimate" in edges else effect
    shown = edges.assign(effect=effect.astype(float)).dropna(subset="effect")
    shown = shown.sort_values("effect", key=np.abs, ascending=False).head(most)
    if shown.empty:
        raise ValueError("there are no edges to draw")
    ends = shown["receiver"].str.split(".").str[0]
    places = _places([*shown["sender"], *ends])
    height = max(y for _, y in places.values())
    figure, axes = one_panel(ax, 6.4, 1.5 + 0.45 * height)
    largest = float(shown["effect"].abs().max()) or 1.0
    for (_, row), end in zip(shown.iterrows(), ends, strict=True):
        what = str(row["receiver"]).rpartition(".")[2]
        colour, width = BLUE if row["effect"] < 0 else ORANGE, 0.4 + 2.6 * abs(row["effect"]) / largest
        arrow = FancyArrowPatch(places[row["sender"]], places[end], arrowstyle="-|>", mutation_scale=8, shrinkA=9,
            shrinkB=9, color=colour, linewidth=width, linestyle=_INPUTS.get(what, "-"), alpha=0.8,
            connectionstyle="arc3,rad=0.08", gid="edge")  # fmt: skip
        axes.add_patch(arrow)
    for name, (x, y) in places.items():
        box = {"boxstyle": "square,pad=0.25" if name.endswith("MLP") else "round,pad=0.25", "fc": "white", "ec": GREY}
        axes.text(x, y, name, ha="center", va="center", fontsize=8, color=INK, bbox=box, zorder=5, gid="node")
    axes.set(xlim=(-1.0, 1.0), ylim=(-0.7, height + 0.7))
    axes.axis("off")
    handles = [(Line2D([], [], color=colour), said) for colour, said in (
        (BLUE, "cutting it lowers the score"), (ORANGE, "raises it"))]  # fmt: skip
    handles += [(Line2D([], [], color=GREY, linestyle=stroke), f"into {what}") for what, stroke in _INPUTS.items()]
    legend_below(figure, handles, [f"the {len(shown)} largest of {len(edges)} edges"], columns=5, ax=ax)
    return figure


def _places(names: list[str]) -> dict[str, tuple[float, float]]:
    """Return where each node stands: rows by layer, MLPs above the heads of their layer, as much apart as fits."""
    rows: dict[tuple[int, int], list[tuple[int, str]]] = {}
    for name in dict.fromkeys(names):
        match = _NODE.fullmatch(name)
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
