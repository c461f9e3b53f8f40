"""The plane of dir_frac and D_head, drawn without pyplot, so that no figure is shown, kept or styled globally."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tlspectral.errors import earlier_calls
from tlspectral.plots.labels import name_points
from tlspectral.plots.style import GREY, PALE, RED, draw_heads, dress, legend_below, one_panel
from tlspectral.selection import head_name
from tlspectral.tables.head_columns import column_title, null_band
from tlspectral.tables.schema import require

_BAND_DEVIATIONS = 2.0

_Entry = tuple[Any, str]  # an artist of the legend (or a tuple of artists drawn over each other), and its text


@earlier_calls(heads="table")
def plane(table: pd.DataFrame, *, highlight_previous_token: int = 5, ax: Axes | None = None) -> Figure:
    """Draw every head in the plane of dir_frac (across) and D_head (up), with the null of both.

    >>> import tlspectral as tls
    >>> heads = tls.analyze_heads(tls.load_model("tiny-rope"), null_draws=10)
    >>> figure = tls.plots.plane(heads, highlight_previous_token=1)
    >>> figure.axes[0].get_title(loc="right")
    '8 heads'

    Use it to find heads whose weights are unusually directional or rotational (FP sections 3, 4 and 6). Dots are
    coloured by layer. A line shows a null's mean and a band its mean ± 2 standard deviations, both medians over heads.
    Every head has its own null, so a head outside the band may be inside its own (see `D_head_z` and
    `D_head_null_pct`).

    Args:
        table: table of `analyze_heads`. Needed columns: `layer, head, dir_frac, D_head`. Used if present: `name`,
            `prev`, the null columns of both metrics, and `table.attrs["model"]` for the title. A note counts heads left
            out because a value is NaN.
        highlight_previous_token: number of heads with the highest `prev` that get a ring and their name. Default: 5.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Returns:
        Figure.

    Raises:
        ValueError: a needed column is missing, the table has no rows, or `highlight_previous_token` is negative.

    Not established: what a head does. Its position shows how its weights are arranged. The rings come from behaviour,
    and heads near them may behave otherwise.
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
        name_points(figure, axes, names, rings, points, colours=[RED] * len(names), gid="previous-token head")
    return figure


def _draw_null(axes: Axes, table: pd.DataFrame, metric: str) -> list[_Entry]:
    """Draw line and band of a metric's null, and return a list with their legend entry; empty without a null in the
    table.
    """
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
    """Draw a ring around the given heads, and return the legend entry; `area` is the area of a dot in square points."""
    look = {"facecolors": "none", "edgecolors": RED, "linewidths": 1.4, "zorder": 4}
    axes.scatter(ringed["dir_frac"], ringed["D_head"], s=3.2 * area, gid="previous-token heads", **look)
    low, high = ringed["prev"].min(), ringed["prev"].max()
    label = f"{len(ringed)} strongest previous-token heads (prev {low:.2f} to {high:.2f})"
    ring = Line2D([], [], linestyle="none", marker="o", markersize=9, markerfacecolor="none", markeredgecolor=RED)
    return ring, label


def _left_out(rows: pd.DataFrame) -> str | None:
    """Return a note about heads that are not drawn, or None if all are drawn."""
    named = ", ".join(rows["name"].head(4)) + (", ..." if len(rows) > 4 else "")
    return f"not drawn, dir_frac or D_head is NaN: {len(rows)} ({named})" if len(rows) else None
