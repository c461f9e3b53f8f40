"""A figure of one column of a head table, as a map of layers and heads."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.plots.labels import name_points
from tlspectral.plots.style import (
    INK,
    colour_bar,
    dress,
    legend_below,
    one_panel,
    sequential_colours,
    two_sided_colours,
)
from tlspectral.selection.node_names import head_name
from tlspectral.tables.head_columns import column_title
from tlspectral.tables.schema import require, require_one_row

_NAMED = 3
_NOT_A_NUMBER = "#b9bec5"


@checked_settings
def heads(
    table: pd.DataFrame, column: str, *, limits: tuple[float, float] | None = None, ax: Axes | None = None
) -> Figure:
    """Draw a column of a head table, layers down and heads across, and label the three heads with the largest values.

    >>> import tlspectral as tls
    >>> table = tls.analyze_heads(tls.load_model("tiny-rope"), null_draws=10)
    >>> figure = tls.plots.heads(table, "D_head")
    >>> figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()
    ('head', 'layer')

    Use it to find heads that stand out in a column. If the column has both signs, orange is above 0 and blue below 0
    on a symmetric scale, and the largest absolute values are named. A head with NaN or an infinite value is grey; a
    head without a row is white.

    Args:
        table: one row per head, with `layer`, `head` and the column, such as the table of `tls.analyze_heads`.
        column: name of the column to draw; its values are numbers or booleans.
        limits: (low, high) ends of the colour scale. Default: the smallest and largest value.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure with a cell per head; the colour bar is in the unit of the column.

    Raises:
        ValueError: a column is missing or is not numeric, the table has no rows, or a head has several rows.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: that a named head is unusual. The largest of many heads is large by chance too; compare the null
    columns and errors of the table.
    """
    require(table, ("layer", "head"), "analyze_heads", named=[column])
    require_one_row(table, ["layer", "head"], "give one row per head")
    if not pd.api.types.is_numeric_dtype(table[column]) and not pd.api.types.is_bool_dtype(table[column]):
        raise ValueError(f"column {column} has values of type {table[column].dtype}: choose a column of numbers")
    layer, head = (table[name].to_numpy(int) for name in ("layer", "head"))
    values = np.full((layer.max() + 1, head.max() + 1), np.nan)
    values[layer, head] = table[column].to_numpy(float, na_value=np.nan)
    has_row = np.zeros(values.shape, dtype=bool)
    has_row[layer, head] = True
    missing = has_row & ~np.isfinite(values)

    cell = min(7.0 / max(values.shape), 0.5)
    size = cell * np.array(values.shape[::-1])
    figure, axes = one_panel(ax, max(size[0], 2.6) + 1.6, max(size[1], 1.8) + 1.3)
    colours = _colours(values, limits)
    down, across = (np.arange(count + 1) - 0.5 for count in values.shape)
    look = {"edgecolors": "white", "linewidth": 0.3, "cmap": colours.cmap, "norm": colours.norm}
    axes.pcolormesh(across, down, np.ma.masked_invalid(values), gid=column, **look)
    axes.scatter(*np.argwhere(missing)[:, ::-1].T, marker="s", s=(60 * cell) ** 2, color=_NOT_A_NUMBER, gid="NaN")
    axes.set(xlim=across[[0, -1]], ylim=down[[-1, 0]], xlabel="head", ylabel="layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=12, integer=True, steps=[1, 2, 5, 10]))
    dress(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(str(table.attrs.get("model", "attention heads")), fontsize=11, color=INK, loc="left")
    colour_bar(figure, colours, axes, column_title(column), whole=False)
    reason = "NaN or infinite" if np.isinf(values).any() else "NaN"
    grey = [(Patch(facecolor=_NOT_A_NUMBER), f"{reason} ({missing.sum()} of {len(table)})")] if missing.any() else []
    legend_below(figure, grey, [], ax=ax)
    finite = values[np.isfinite(values)]
    sizes = np.abs(values) if (finite < 0).any() and (finite > 0).any() else values
    n_named = min(_NAMED, len(finite))
    largest = np.argsort(np.where(np.isfinite(values), sizes, -np.inf), axis=None)[::-1][:n_named]
    if len(largest):
        pairs = np.array(np.unravel_index(largest, values.shape)).T
        places = pairs[:, ::-1].astype(float)
        names = [head_name(int(row), int(place)) for row, place in pairs]
        name_points(figure, axes, names, places, places, colours=[INK] * len(names), gid="largest")
    return figure


def _colours(values: np.ndarray, limits: tuple[float, float] | None) -> ScalarMappable:
    """Return a ScalarMappable, the matplotlib colour map and scale for an array of values: purple to orange around 0 if
    they have both signs, otherwise pale to dark.

    `limits` are (low, high) ends of the scale; None takes the smallest and largest finite value.
    """
    if limits is not None and (not isinstance(limits, list | tuple | np.ndarray) or len(limits) != 2):
        raise ValueError(f"limits= must be two numbers, such as (0, 1); found {shown(limits)}")
    finite = values[np.isfinite(values)]
    low, high = (
        limits if limits is not None else ((float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0))
    )
    if low < 0 < high:
        reach = max(-low, high)
        return two_sided_colours(reach)
    colours = sequential_colours(pd.Series([low, high]))
    return ScalarMappable(colours.norm, colours.cmap.reversed())
