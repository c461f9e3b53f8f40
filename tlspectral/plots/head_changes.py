"""How far the heads of two models differ, in behaviour and in their spectrum."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlspectral.plots.labels import name_points
from tlspectral.plots.style import BLUE, INK, ORANGE, PALE, draw_dots, dress, legend_below, one_panel
from tlspectral.tables.required import require

_COLOURS = {"behaviour": BLUE, "spectrum": ORANGE}


def head_changes(comparison: pd.DataFrame, *, highlight: int = 5, ax: Axes | None = None) -> Figure:
    """Draw the largest change of every head's behaviour and of its spectrum, layer by layer.

    The band around 0 is the floor below which no change counts.

    Args:
        comparison: table of `compare_heads`. Heads without a change beyond noise and floor are left out and counted.
        highlight: how many of the most changed heads get their name, with the column that changed.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a missing column, no rows, or `highlight` is negative.

    What it does not establish: that the named heads do something else now. A change of 0.1 in attention and one of 0.1
    in the spectrum have no common unit.
    """
    if highlight < 0:
        raise ValueError(f"highlight is {highlight}: give 0 or more heads")
    columns = [f"{family}_{part}" for family in _COLOURS for part in ("change", "of")]
    require(comparison, ("layer", "head", "name", "change_rank", *columns), "compare_heads")
    figure, axes = one_panel(ax, 7.2, 4.2)
    floor = float(comparison.attrs.get("floor", 0.0))
    axes.axhspan(-floor, floor, color=PALE, linewidth=0, zorder=0, gid="floor")
    heads = int(comparison["head"].max()) + 1
    drawn, texts, places, colours = [np.empty((0, 2))], [], [], []
    for family, colour in _COLOURS.items():
        shown = comparison.dropna(subset=[f"{family}_change"])
        across = shown["layer"].to_numpy(float) + 0.8 * ((shown["head"].to_numpy(float) + 0.5) / heads - 0.5)
        points = np.stack([across, shown[f"{family}_change"].to_numpy(float)], axis=1)
        draw_dots(axes, points, 24, [colour] * len(points), family)
        drawn.append(points)
        for row, point in zip(shown.to_dict("records"), points, strict=True):
            if row["change_rank"] <= highlight:
                texts.append(f"{row['name']} {row[f'{family}_of']}")
                places.append(point)
                colours.append(colour)
    every = np.concatenate(drawn)
    reach = 1.2 * max(2 * floor, float(np.abs(every[:, 1]).max(initial=0.0)))
    axes.set(xlim=(-0.6, comparison["layer"].max() + 0.6), ylim=(-reach, reach), xlabel="layer", ylabel="difference")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    dress(axes)
    models = [str(comparison.attrs.get(key, {}).get("model", key)) for key in ("a", "b")]
    axes.set_title(f"{models[1]} less {models[0]}", fontsize=12, color=INK, loc="left")
    left_out = int(comparison["change_rank"].isna().sum())
    note = f"not drawn, no change beyond noise and floor: {left_out}" if left_out else None
    dots = {
        "behaviour": "behaviour: prev, dup or ind, in attention",
        "spectrum": "spectrum: a column of weights, 0 to 1",
    }
    entries = [
        (Line2D([], [], linestyle="none", marker="o", color=_COLOURS[family]), text) for family, text in dots.items()
    ]
    legend_below(figure, [*entries, (Patch(facecolor=PALE), f"below the floor of {floor:g}")], [note], ax=ax)
    if texts:
        name_points(figure, axes, texts, np.array(places), every, colours=colours, gid="changed head")
    return figure
