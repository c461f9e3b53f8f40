"""Percentiles of the strongest heads of one kind within their models, one strip per model."""

from bisect import bisect_left
from collections.abc import Mapping
from functools import cache

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from scipy.stats import hypergeom

from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, PALE, draw_dots, dress, legend_below, one_panel
from tlspectral.stats import TopHeadPercentile, top_head_percentile

_KINDS = {"prev": "previous-token", "dup": "duplicate-token", "ind": "induction"}
_TAIL = 0.025


def percentile_strip(
    tables: pd.DataFrame | Mapping[str, pd.DataFrame],
    column: str = "D_head",
    *,
    detector: str = "prev",
    top: int = 5,
    ax: Axes | None = None,
) -> Figure:
    """Draw the within-model percentiles of each model's strongest heads ("Fingerprint, Not Blueprint", section 6).

    One strip per model from the model's lowest head of that column (0) to its highest (1). Dots are the `top` heads of
    a detector, larger for the stronger; the upright line is their median. The band is the null of that median: where
    95 % of the medians of as many heads drawn at random from the model fall.

    Args:
        tables: one table of `analyze_heads`, or several by the name that is written beside the strip.
        column: what the heads are ranked by: rank / n, ties sharing their mean rank.
        detector: the heads are the strongest by this column.
        top: how many heads of each model.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: no table, a missing column, `top` below 1, or a model with fewer heads that have both numbers; the
            message names the model.

    What it does not establish: that a model's strongest heads are of the kind at all: look at their scores first. Heads
    of one layer are not independent draws, so the band is a lower limit of the null's width.
    """
    if isinstance(tables, pd.DataFrame):
        tables = {str(tables.attrs.get("model", "attention heads")): tables}
    if not tables:
        raise ValueError("no table: give one table of analyze_heads, or several by name")
    percentiles: dict[str, TopHeadPercentile] = {}
    for name, table in tables.items():
        try:
            percentiles[name] = top_head_percentile(table, column=column, by=detector, k=top)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    figure, axes = one_panel(ax, 7.2, 1.9 + 0.46 * len(percentiles))
    heights = np.arange(len(percentiles))[::-1]
    for height, (name, result) in zip(heights, percentiles.items(), strict=True):
        low, high = _random_medians(result.n, result.k)
        band = {"color": PALE, "linewidth": 0, "zorder": 0, "gid": f"null of {name}"}
        axes.fill_betweenx([height - 0.3, height + 0.3], low, high, **band)
        axes.plot([0, 1], [height, height], color=GREY, linewidth=0.8, zorder=1)
        points = np.stack([result.percentiles, np.full(result.k, height)], axis=1)
        draw_dots(axes, points, np.linspace(70, 22, result.k), BLUE, f"heads of {name}", rim=0.7)
        ends = [height - 0.34, height + 0.34]
        axes.plot([result.statistic] * 2, ends, color=ORANGE, linewidth=2.4, zorder=2, gid=f"median of {name}")
    axes.axvline(0.5, color=GREY, linewidth=0.8, linestyle=(0, (5, 2)), zorder=0.5)
    dress(axes)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(heights, [f"{name}\n{result.n} heads" for name, result in percentiles.items()])
    axes.set(xlim=(-0.02, 1.02), ylim=(-0.6, len(percentiles) - 0.4))
    axes.set_xlabel(f"percentile of {column} within the model (rank / n: share of heads at or below)")
    dot = Line2D([], [], linestyle="none", marker="o", markersize=7, color=BLUE)
    line = Line2D([], [], linestyle="none", marker="|", markersize=11, markeredgewidth=2.4, color=ORANGE)
    kind = f"{top} strongest {_KINDS.get(detector, detector)} head{'s' * (top != 1)}"
    entries: list[tuple[Artist, str]] = [
        (dot, f"{kind} by {detector}, larger: stronger"),
        (line, "their median"),
        (Patch(facecolor=PALE), f"95 % of medians of {top} random head{'s' * (top != 1)}"),
    ]
    legend_below(figure, entries, [], ax=ax)
    title = next(iter(percentiles)) if len(percentiles) == 1 else f"{len(percentiles)} models"
    axes.set_title(title, fontsize=12, color=INK, loc="left")
    return figure


@cache
def _random_medians(n: int, k: int) -> tuple[float, float]:
    """Central 95 % of the median percentile of k of n heads drawn without replacement; exact.

    The distribution is symmetric, so the upper end mirrors the lower one.
    """
    middle = (k + 1) // 2
    lower = np.arange(middle, n - k + middle + 1)  # rank of the middle head, of an even k that of the lower one
    chances = hypergeom.pmf(middle, n, lower, k) * middle / lower

    def share(doubled: int) -> float:
        """Probability that twice the rank of the median is at most `doubled`."""
        between = np.clip(doubled - 2 * lower, 0, n - lower)  # ranks left to the upper middle head, of an even k
        reached = 1 - hypergeom.pmf(0, n - lower, between, k - middle) if k % 2 == 0 else 2 * lower <= doubled
        return float(chances @ reached)

    low = bisect_left(range(2 * n + 1), _TAIL * (1 - 1e-9), key=share) / 2
    return low / n, (n + 1 - low) / n
