"""How far the heads of two models differ, in units of the noise."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlspectral.plots.labels import name_points
from tlspectral.plots.style import BLUE, GREY, INK, PALE, draw_dots, dress, legend_below, one_panel
from tlspectral.tables.required import require


def head_changes(comparison: pd.DataFrame, *, highlight: int = 5, ax: Axes | None = None) -> Figure:
    """Draw the largest change of every head in units of its band, layer by layer.

    The scale is linear inside the band (shaded, up to 1) and logarithmic beyond it.

    Args:
        comparison: table of `compare_heads`. Heads without a finite `change` are left out and counted.
        highlight: how many of the most changed heads get their name, with the column that changed most. A head that
            did not change gets none.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a missing column, no rows, or `highlight` is negative.

    What it does not establish: that the named heads do something else now. Heads are compared in different columns,
    whose bands may come from different noise.
    """
    if highlight < 0:
        raise ValueError(f"highlight is {highlight}: give 0 or more heads")
    require(comparison, ("layer", "head", "name", "change", "change_of"), "compare_heads")
    shown = comparison.loc[np.isfinite(comparison["change"].to_numpy(float))]
    heads = int(comparison["head"].max()) + 1
    across = shown["layer"].to_numpy(float) + 0.8 * ((shown["head"].to_numpy(float) + 0.5) / heads - 0.5)
    points = np.stack([across, shown["change"].to_numpy(float)], axis=1)
    figure, axes = one_panel(ax, 7.2, 4.2)
    axes.axhspan(0, 1, color=PALE, linewidth=0, zorder=0, gid="band")
    draw_dots(axes, points, 24, np.where(points[:, 1] > 1, BLUE, GREY).tolist(), "heads")
    axes.set_yscale("symlog", linthresh=1)
    axes.set(ylim=(0, 2 * max(1.0, points[:, 1].max(initial=0.0))), xlabel="layer", ylabel="largest |change| / band")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    dress(axes)
    models = [str(comparison.attrs.get(key, {}).get("model", key)) for key in ("a", "b")]
    axes.set_title(f"{models[1]} against {models[0]}", fontsize=12, color=INK, loc="left")
    left_out = len(comparison) - len(shown)
    note = f"not drawn, no finite change: {left_out}" if left_out else None
    legend_below(figure, [(Patch(facecolor=PALE), "within the band: what noise explains")], [note], ax=ax)
    order = np.argsort(-points[:, 1], kind="stable")[:highlight]
    order = order[points[order, 1] > 0]
    if len(order):
        names = [f"{name} {column}" for name, column in shown.iloc[order][["name", "change_of"]].to_numpy()]
        name_points(figure, axes, names, points[order], points, colours=[INK] * len(names), gid="changed head")
    return figure
