"""The plane of dir_frac and D_head, drawn without pyplot: nothing is shown, kept or styled globally."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tlspectral.errors import earlier_calls
from tlspectral.plots.labels import name_points
from tlspectral.plots.style import GREY, PALE, draw_heads, dress, legend_below, one_panel
from tlspectral.selection import head_name
from tlspectral.tables.head_columns import column_title, null_band
from tlspectral.tables.schema import require

_RING = "#c8102e"
_BAND_DEVIATIONS = 2.0

_Entry = tuple[Any, str]  # what the legend draws, artists over one another in a tuple, and its text


@earlier_calls(heads="table")
def plane(table: pd.DataFrame, *, highlight_previous_token: int = 5, ax: Axes | None = None) -> Figure:
    """Draw every head in the plane of dir_frac (across) and D_head (up), with their null.

    Dots are coloured by layer. Each null is a line at the median over heads of its mean, in a band of plus and minus 2
    null standard deviations (median over heads): where a head of random directions would usually fall. Every head has
    its own null, so the band is a typical head's: a head outside it may still be inside its own, and the other
    way round (see the columns `D_head_z` and `D_head_null_pct`). Nulls that are not in the table are not drawn.

    Args:
        table: table of `analyze_heads`. Needed: `layer, head, dir_frac, D_head`. Used where there: `name, prev`, the
            null columns of the two metrics, and `table.attrs["model"]` for the title. Rows without D_head or dir_frac
            are left out; a note in the figure says so.
        highlight_previous_token: how many heads with the highest `prev` get a ring and their name; none if `prev` is
            missing or NaN.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a needed column is missing, the table has no rows, or `highlight_previous_token` is negative.

    Source: FP sections 3, 4 and 6. A head's position shows how its weights are arranged. It does not show what the
    head does: the rings come from behaviour, and heads near them may behave otherwise.
    """
    if highlight_previous_token < 0:
        raise ValueError(f"highlight_previous_token is {highlight_previous_token}: give 0 or more heads")
    require(table, ("layer", "head", "dir_frac", "D_head"), "analyze_heads")

    table = table.reset_index(drop=True)
    if "name" not in table:
        table["name"] = list(map(head_name, table["layer"], table["head"]))
    if "prev" not in table:
        table["prev"] = float("nan")
    coordinates = ["dir_frac", "D_head"]
    drawn = table.dropna(subset=coordinates)
    ringed = table.dropna(subset=["prev"]).nlargest(highlight_previous_token, "prev").dropna(subset=coordinates)

    figure, axes = one_panel(ax, 7.2, 5.6)
    entries = [*_draw_null(axes, table, "dir_frac"), *_draw_null(axes, table, "D_head")]
    points = drawn[coordinates].to_numpy(float)
    area = draw_heads(figure, axes, points, drawn, table)
    if len(ringed):
        entries.append(_draw_rings(axes, ringed, area))
    axes.margins(0.06)
    across, up = map(column_title, coordinates)
    axes.set(
        xlabel=rf"{across}$\; = \;\Vert M_A \Vert \,/\, \Vert M \Vert$  (0 symmetric, 1 antisymmetric)",
        ylabel=f"{up}\n" + r"$\Sigma\,|\mathrm{Im}\,\lambda| \;/\; \Sigma\,|\lambda|$  (0 real spectrum, 1 imaginary)",
    )
    dress(axes)
    legend_below(figure, entries, [_left_out(table.drop(index=drawn.index))], ax=ax)
    if len(ringed):
        names, rings = [str(name) for name in ringed["name"]], ringed[coordinates].to_numpy(float)
        name_points(figure, axes, names, rings, points, colours=[_RING] * len(names), gid="previous-token head")
    return figure


def _draw_null(axes: Axes, table: pd.DataFrame, metric: str) -> list[_Entry]:
    """Draw line and band of one metric's null; returns their legend entry, none without a null in the table."""
    null = null_band(table, metric)
    if null is None:
        return []
    centre, deviation = null
    reach = _BAND_DEVIATIONS * deviation
    if metric == "dir_frac":
        dashes, span, line = (1, 1.6), axes.axvspan, axes.axvline
    else:
        dashes, span, line = (5, 2), axes.axhspan, axes.axhline
    look: dict[str, Any] = {"color": GREY, "linewidth": 1.2, "linestyle": (0, dashes)}
    span(centre - reach, centre + reach, color=PALE, linewidth=0, zorder=0, gid=f"{metric} null band")
    line(centre, **look, zorder=1, gid=f"{metric} null mean")
    text = rf"{column_title(metric)} of random directions: {centre:.3f} $\pm$ {reach:.2g} (2 sd), medians over heads"
    return [((Patch(facecolor=PALE), Line2D([], [], **look)), text)]


def _draw_rings(axes: Axes, ringed: pd.DataFrame, area: float) -> _Entry:
    look = {"facecolors": "none", "edgecolors": _RING, "linewidths": 1.4, "zorder": 4}
    axes.scatter(ringed["dir_frac"], ringed["D_head"], s=3.2 * area, gid="previous-token heads", **look)
    low, high = ringed["prev"].min(), ringed["prev"].max()
    label = f"{len(ringed)} strongest previous-token heads (prev {low:.2f} to {high:.2f})"
    ring = Line2D([], [], linestyle="none", marker="o", markersize=9, markerfacecolor="none", markeredgecolor=_RING)
    return ring, label


def _left_out(rows: pd.DataFrame) -> str | None:
    named = ", ".join(rows["name"].head(4)) + (", ..." if len(rows) > 4 else "")
    return f"not drawn, dir_frac or D_head is NaN: {len(rows)} ({named})" if len(rows) else None
