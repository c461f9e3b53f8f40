"""The plane of dir_frac and D_head, drawn without pyplot, so that no figure is shown, kept or styled globally."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tlspectral.errors import earlier_calls
from tlspectral.errors.settings import checked_settings
from tlspectral.plots.labels import name_points
from tlspectral.plots.style import GREY, PALE, RED, draw_heads, dress, legend_below, one_panel
from tlspectral.selection.node_names import head_name
from tlspectral.tables.head_columns import column_title, null_band
from tlspectral.tables.schema import require

_BAND_DEVIATIONS = 2.0

_Entry = tuple[Any, str]  # an artist of the legend (or a tuple of artists drawn over each other), and its text


@earlier_calls(heads="table")
@checked_settings
def plane(table: pd.DataFrame, *, highlight_previous_token: int = 5, ax: Axes | None = None) -> Figure:
    """Draw every head by its directional share dir_frac (across) and its rotational share D_head (up), with the null of
    both.

    >>> import tlspectral as tls
    >>> heads = tls.analyze_heads(tls.load_model("tiny-rope"), null_draws=10)
    >>> figure = tls.plots.plane(heads, highlight_previous_token=1)
    >>> figure.axes[0].get_title(loc="right")
    '8 heads'

    Use it to find heads whose weights are unusually directional or rotational ("Fingerprint, Not Blueprint", sections
    3, 4 and 6). M is the head's query-key matrix, M_A its antisymmetric part: dir_frac is ‖M_A‖ / ‖M‖, and D_head is
    Σ|Im λ| / Σ|λ| over the eigenvalues λ of M. A dashed line shows the mean of a null (random directions with the
    head's singular values), a band its mean ± 2 standard deviations, both as medians over heads. Every head has its own
    null, so a head outside the band may be inside its own (see `D_head_z` and `D_head_null_pct`).

    Args:
        table: table of `tls.analyze_heads`. Needed columns: `layer, head, dir_frac, D_head`. Used if present: `name`,
            `prev` (attention to the previous token), the null columns of both metrics, and `table.attrs["model"]` for
            the title. A note counts heads left out because a value is NaN.
        highlight_previous_token: number of heads with the highest `prev` that get a ring and their name. Default: 5.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure: a dot per head, coloured by layer; both axes are shares from 0 to 1.

    Raises:
        ValueError: a needed column is missing, the table has no rows, or `highlight_previous_token` is negative.
        TypeError: `ax` is not a matplotlib Axes.

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
    """Draw the mean of a metric's null into `axes` as a line and ± 2 standard deviations as a band; return [(artists,
    legend text)].

    `metric` is "dir_frac" or "D_head", a column of the head table `table`. Draw nothing and return [] if the table has
    no null columns for it.
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
    """Draw a red ring into `axes` around each head in `ringed` (rows with dir_frac, D_head and prev), and return its
    legend entry (artist, text).

    `area` is the area of a head's dot in square points.
    """
    look = {"facecolors": "none", "edgecolors": RED, "linewidths": 1.4, "zorder": 4}
    axes.scatter(ringed["dir_frac"], ringed["D_head"], s=3.2 * area, gid="previous-token heads", **look)
    low, high = ringed["prev"].min(), ringed["prev"].max()
    label = f"{len(ringed)} strongest previous-token heads (prev {low:.2f} to {high:.2f})"
    ring = Line2D([], [], linestyle="none", marker="o", markersize=9, markerfacecolor="none", markeredgecolor=RED)
    return ring, label


def _left_out(rows: pd.DataFrame) -> str | None:
    """Return a note (text) with the number and first names of the heads in `rows`, which are not drawn; None if `rows`
    is empty.
    """
    named = ", ".join(rows["name"].head(4)) + (", ..." if len(rows) > 4 else "")
    return f"not drawn, dir_frac or D_head is NaN: {len(rows)} ({named})" if len(rows) else None
