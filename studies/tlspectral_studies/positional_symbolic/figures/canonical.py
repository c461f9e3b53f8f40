"""Figures of the canonical tasks: accuracy by frequency and by position, queries and keys during training.

All refuse a table without rows or a needed column, or with two rows where one is drawn (ValueError).
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, dress, new_figure
from tlspectral.tables.schema import require

_KEY = ORANGE
_PATH = "#8fb4d3"
_UNIT = r"rotary angle, in units of $\pi/33$ per token"
# Colour, marker and dashes each tell the arms apart, on a grey print too.
_ARMS = {
    ("index", 1): ("index", BLUE, "o", "-"),
    ("retrieval", 1): ("retrieval", ORANGE, "s", (0, (5, 1.5))),
    ("partial_induction", 1): ("partial induction, one frequency", ORANGE, "s", (0, (5, 1.5))),
    ("partial_induction", 2): ("partial induction, two frequencies: 0 and the angle", BLUE, "o", "-"),
}
_PANELS = (("index", "retrieval"), ("partial_induction",))
_TICKS = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0, 2.0)
_LINEAR_UP_TO = 0.01
_COLUMNS = 2
_LABEL_SPACING = 0.055  # of an axis' height


def accuracy_against_angle(accuracy: pd.DataFrame) -> Figure:
    """Draw accuracy at each angle: index against retrieval, one frequency against two (PS Figure 2A-B).

    Lines join means over seeds, small dots are the seeds, dotted lines say what a head reaches that answers what the
    context has most of: the most without positions for index, without symbols and positions for retrieval. The axis of
    angles is logarithmic from 0.01 on, so that the small ones can be told apart.

    Args:
        accuracy: table of `canonical_sweep`. Needed: `task, n_frequencies, angle, seed, accuracy, most_frequent`.

    A panel is for index and retrieval and one for partial induction, or the one of them that the table has rows for.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, Figure 2). What it does not establish: an
    interval for the mean. The dots are few, and runs of one seed share weights and prompts over the angles.
    """
    arms = _arms_in(accuracy, ("task", "n_frequencies", "angle", "seed", "accuracy", "most_frequent"))
    panels = [[arm for arm in arms if arm[0] in tasks] for tasks in _PANELS]
    panels = [inside for inside in panels if inside]
    figure = new_figure(4.2 * len(panels), 3.7)
    all_axes = np.atleast_1d(figure.subplots(1, len(panels), sharey=True))
    for axes, inside in zip(all_axes, panels, strict=True):
        for arm in inside:
            label, colour, marker, dashes = _ARMS[arm]
            rows = _rows_of(accuracy, arm).sort_values("angle")
            mean = rows.groupby("angle", as_index=False).agg({"accuracy": "mean"})
            counted = rows["most_frequent"].iloc[0]
            axes.axhline(counted, color=colour, linewidth=0.9, linestyle=":", gid=f"most frequent {arm}")
            axes.plot(
                rows["angle"],
                rows["accuracy"],
                ".",
                color=colour,
                markersize=4,
                alpha=0.6,
                zorder=3,
                gid=f"seeds {arm}",
            )
            axes.plot(
                mean["angle"],
                mean["accuracy"],
                color=colour,
                marker=marker,
                markersize=6,
                markerfacecolor="white",
                linestyle=dashes,
                linewidth=1.6,
                label=label,
                gid=f"mean {arm}",
            )
        axes.plot([], [], ":", color=GREY, linewidth=0.9, label="the most frequent answer of the context")
        axes.set_xscale("symlog", linthresh=_LINEAR_UP_TO, linscale=0.4)
        angles = np.unique(accuracy["angle"])
        axes.set_xticks([tick for tick in _TICKS if angles[0] <= tick <= angles[-1]])
        axes.set_xticks(angles, minor=True)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_ylim(0, 1.02)
        axes.set_xlabel(_UNIT, color=INK)
        dress(axes)
        axes.legend(
            frameon=False, fontsize=8.5, labelcolor=INK, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=3
        )
    all_axes[0].set_ylabel("accuracy", color=INK)
    return figure


def accuracy_against_position(by_position: pd.DataFrame, *, bin_width: int = 4) -> Figure:
    """Draw accuracy by where the answer stands, a panel per arm and a line per angle (PS Figure 3A).

    Lines join means over seeds, bands reach from the lowest to the highest seed. Positions are pooled in bins, each
    drawn at its middle; a bin without answers is left out. The number at the end of a line is its angle.

    Args:
        by_position: table of `canonical_sweep`, or some of its rows, to draw fewer angles. Needed: `task,
            n_frequencies, angle, seed, position, n, correct`.
        bin_width: positions in a bin.

    Raises:
        ValueError: a column is missing, the table has no rows, an arm is unknown, or bins are narrower than 1.

    Source: PS, Figure 3A. What it does not establish: why an arm is worse at some positions; that takes the attention
    weights.
    """
    needed = ("task", "n_frequencies", "angle", "seed", "position", "n", "correct")
    arms = _arms_in(by_position, needed)
    if bin_width < 1:
        raise ValueError(f"bin_width is {bin_width}: give the positions in a bin, at least 1")
    pooled = by_position.assign(middle=by_position["position"] // bin_width * bin_width + (bin_width - 1) / 2)
    pooled = _pooled(pooled, "middle")
    colours = _angle_colours(by_position)
    figure, all_axes = _panels_by_arm(arms)
    for axes, arm in zip(all_axes, arms, strict=True):
        ends = []
        for angle, rows in _rows_of(pooled, arm).groupby("angle"):
            over_seeds = rows.groupby("middle")["accuracy"].agg(["mean", "min", "max"])
            colour = colours[angle]
            axes.fill_between(
                over_seeds.index, over_seeds["min"], over_seeds["max"], color=colour, alpha=0.2, linewidth=0
            )
            axes.plot(over_seeds.index, over_seeds["mean"], "o-", color=colour, markersize=3, gid=f"angle {angle:g}")
            ends.append((np.asarray(over_seeds["mean"])[-1], f"{angle:g}", colour))
        _name_lines(axes, ends)
    _label_panels(all_axes, "position of the answer (0: first of the context)")
    return figure


def accuracy_while_learning(progress: pd.DataFrame) -> Figure:
    """Draw accuracy over the steps of training, a panel per arm and a line per angle (PS Figure 2).

    Lines join means over seeds of the share of right answers over all positions.

    Args:
        progress: table of `canonical_sweep`. Needed: `task, n_frequencies, angle, seed, step, n, correct`.

    Source: PS, Figure 2, which is over epochs. What it does not establish: where a longer training would end.
    """
    arms = _arms_in(progress, ("task", "n_frequencies", "angle", "seed", "step", "n", "correct"))
    pooled = _pooled(progress, "step")
    figure, all_axes = _panels_by_arm(arms)
    colours = _angle_colours(progress)
    for axes, arm in zip(all_axes, arms, strict=True):
        ends = []
        for angle, rows in _rows_of(pooled, arm).groupby("angle"):
            mean = rows.groupby("step", as_index=False).agg({"accuracy": "mean"})
            colour = colours[angle]
            axes.plot(mean["step"], mean["accuracy"], color=colour, linewidth=1.4, gid=f"angle {angle:g}")
            ends.append((np.asarray(mean["accuracy"])[-1], f"{angle:g}", colour))
        _name_lines(axes, ends)
    _label_panels(all_axes, "gradient steps")
    return figure


def query_key_paths(trajectories: pd.DataFrame) -> Figure:
    """Draw queries and keys of a head of one frequency in its rotary plane over its training (PS Figure 3B).

    A panel per angle. Thin lines are paths from the first to the last step that is in the table. Dots are the queries
    where they end, coloured by the position they ask for; crosses are the keys of all pairs where they end.

    Args:
        trajectories: table of `query_key_trajectories`, of one seed. Needed: `angle, seed, step, kind, token, label, x,
            y`.

    Source: PS, Figure 3B. What it does not establish: a scale that can be compared between panels. Queries may grow
    while keys shrink without any change of a score.
    """
    require(trajectories, ("angle", "seed", "step", "kind", "token", "label", "x", "y"), "the canonical sweep")
    if trajectories["seed"].nunique() > 1:
        seeds = ", ".join(str(seed) for seed in trajectories["seed"].unique())
        raise ValueError(f"the table has the seeds {seeds}: give the rows of one, the paths of several would mix")
    angles = np.unique(trajectories["angle"])
    figure = new_figure(3.1 * len(angles) + 0.8, 3.5)
    all_axes = np.atleast_1d(figure.subplots(1, len(angles)))
    positions = trajectories.loc[trajectories["kind"] == "query", "label"]
    palette = ScalarMappable(Normalize(0, max(int(positions.max()), 1)), colormaps["viridis"])
    for axes, angle in zip(all_axes, angles, strict=True):
        rows = trajectories.query("angle == @angle").sort_values(["kind", "token", "step"])
        for kind, colour in (("key", _KEY), ("query", _PATH)):
            of_kind = rows[rows["kind"] == kind]
            paths = [np.asarray(path[["x", "y"]]) for _, path in of_kind.groupby("token")]
            width, alpha = (0.3, 0.12) if kind == "key" else (0.9, 0.8)
            lines = LineCollection(paths, colors=colour, linewidths=width, alpha=alpha, rasterized=True, zorder=1)
            lines.set_gid(f"{kind} paths")
            axes.add_collection(lines)
            last = of_kind[of_kind["step"] == of_kind["step"].max()]
            if kind == "key":
                dots = axes.scatter(last["x"], last["y"], s=9, marker="x", color=colour, linewidths=0.6, zorder=2)
            else:
                dots = axes.scatter(
                    last["x"],
                    last["y"],
                    s=30,
                    color=palette.to_rgba(np.asarray(last["label"], dtype=float)),
                    edgecolors=INK,
                    linewidths=0.5,
                    zorder=3,
                )
            dots.set_gid(f"{kind} ends")
        axes.axhline(0, color=GREY, linewidth=0.5, zorder=0)
        axes.axvline(0, color=GREY, linewidth=0.5, zorder=0)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set_title(rf"angle {angle:g} $\pi/33$", fontsize=10, color=INK, loc="left")
        dress(axes)
    all_axes[0].set_ylabel("imaginary coordinate", color=INK)
    figure.supxlabel("real coordinate, before rotation", fontsize=10, color=INK)
    bar = figure.colorbar(palette, ax=list(all_axes), fraction=0.04, pad=0.02, aspect=30)
    bar.set_label("dots: queries, by the position asked for", color=INK)
    bar.outline.set_visible(False)
    return figure


def _arms_in(table: pd.DataFrame, needed: tuple[str, ...]) -> list[tuple[str, int]]:
    require(table, needed, "the canonical sweep")
    in_table = {(str(task), int(count)) for task, count in zip(table["task"], table["n_frequencies"], strict=True)}
    unknown = sorted(in_table - set(_ARMS))
    if unknown:
        raise ValueError(f"task and number of frequencies {unknown[0]} are not among {', '.join(map(str, _ARMS))}")
    return [arm for arm in _ARMS if arm in in_table]


def _pooled(table: pd.DataFrame, by: str) -> pd.DataFrame:
    """Accuracy of each head by a column, from summed counts; groups without prompts are left out."""
    heads = ["task", "n_frequencies", "angle", "seed", by]
    sums = table.groupby(heads, as_index=False).agg({"n": "sum", "correct": "sum"}).query("n > 0")
    return sums.assign(accuracy=sums["correct"] / sums["n"])


def _rows_of(table: pd.DataFrame, arm: tuple[str, int]) -> pd.DataFrame:
    return table.query("task == @arm[0] and n_frequencies == @arm[1]")


def _angle_colours(table: pd.DataFrame) -> dict[Any, Any]:
    """Viridis without its palest end, by rank: the angles lie too unevenly for a scale."""
    angles = np.unique(table["angle"])
    return dict(zip(angles, colormaps["viridis"](np.linspace(0.0, 0.78, len(angles))), strict=True))


def _panels_by_arm(arms: list[tuple[str, int]]) -> tuple[Figure, list[Axes]]:
    """A figure with a panel of accuracies for each arm, two in a row."""
    columns = min(_COLUMNS, len(arms))
    n_rows = -(-len(arms) // columns)
    figure = new_figure(4.6 * columns, 3.3 * n_rows)
    all_axes = figure.subplots(n_rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, arm in zip(all_axes, arms, strict=False):
        axes.set_ylim(0, 1.02)
        axes.set_title(_ARMS[arm][0], fontsize=10, color=INK, loc="left")
        dress(axes)
    for axes in all_axes[len(arms) :]:
        axes.remove()
    return figure, list(all_axes[: len(arms)])


def _label_panels(panels: list[Axes], label: str) -> None:
    """Label the outer axes of the panels; the last row may be half full."""
    columns = min(_COLUMNS, len(panels))
    for index, axes in enumerate(panels):
        if index % columns == 0:
            axes.set_ylabel("accuracy", color=INK)
        if index + columns >= len(panels):
            axes.tick_params(labelbottom=True)
            axes.set_xlabel(label, color=INK)


def _name_lines(axes: Axes, ends: list[tuple[float, str, np.ndarray]]) -> None:
    """Write each line's angle right of its end, pushed apart where lines end close to each other."""
    ends = sorted(ends, key=lambda end: end[0])
    heights = [end[0] for end in ends]
    for _ in range(200):
        for low, high in pairwise(range(len(ends))):
            lacking = _LABEL_SPACING - (heights[high] - heights[low])
            if lacking > 0:
                heights[low], heights[high] = max(0.01, heights[low] - lacking / 2), heights[high] + lacking / 2
    for height, (end, name, colour) in zip(heights, ends, strict=True):
        axes.annotate(
            name,
            (1.0, end),
            xytext=(1.03, height),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            color=colour,
            annotation_clip=False,
        )
