"""A column of a head table as a grid: layers across, heads down."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from tlspectral.plots.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    colour_bar,
    draw_cells,
    dress,
    legend_below,
    one_panel,
    sequential_colours,
    two_decimals,
)
from tlspectral.tables import COLUMNS
from tlspectral.tables.null_band import null_band
from tlspectral.tables.required import require

_WHITE_GAPS_BELOW = 40  # layers or heads: with more of them the gaps would hide the cells
_SIGNED = LinearSegmentedColormap.from_list("signed", ["#0b3c6b", BLUE, "#e3e6ea", ORANGE, "#8a4800"])


def head_grid(heads: pd.DataFrame, column: str = "D_head", *, ax: Axes | None = None) -> Figure:
    """Draw one column of every head as colours.

    Columns that may be negative are drawn from blue over pale to orange around 0, all others in viridis. The colour bar
    carries the null: for a column with `<column>_null_mean`, a line at the median over heads of its mean and a band of
    2 null standard deviations (median over heads) to both sides; for a `_z` column the same at 0 +- 2. Every head has
    its own null: read single heads by `<column>_z` or `<column>_null_pct`.

    Args:
        heads: table of `analyze_heads`, or any with `layer`, `head` and the column.
        column: what is drawn; numeric. NaN is hatched; a head that the table lacks stays white.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a missing column or one that is not numeric, no rows, or two rows for one head.

    What it does not establish: that neighbours in the grid are related. The order of heads within a layer has no
    meaning.
    """
    require(heads, ("layer", "head", column), "analyze_heads")
    if not pd.api.types.is_numeric_dtype(heads[column]):
        raise ValueError(f"the column {column} is not numeric: choose one that is")
    if heads.duplicated(["layer", "head"]).any():
        layer, head = heads.loc[heads.duplicated(["layer", "head"]), ["layer", "head"]].iloc[0]
        raise ValueError(f"the table has two rows for L{layer}H{head}: give a table of one model")

    layers, rows = int(heads["layer"].max()) + 1, int(heads["head"].max()) + 1
    values = np.full((rows, layers), np.nan)
    values[heads["head"], heads["layer"]] = heads[column].to_numpy(float)
    cell = float(np.clip(7.2 / layers, 0.09, 0.34))
    figure, axes = one_panel(ax, max(4.4, cell * layers + 1.8), max(2.3, cell * rows + 1.5))
    colours = _colours(heads[column], column)
    gaps = ("white", 0.8) if max(layers, rows) < _WHITE_GAPS_BELOW else ("face", 0.0)
    draw_cells(axes, values, colours, "heads", edgecolors=gaps[0], linewidth=gaps[1])
    unknown = heads[~np.isfinite(heads[column].to_numpy(float))]
    hatched = {"facecolor": "white", "edgecolor": GREY, "hatch": "////", "linewidth": 0}
    for layer, head in zip(unknown["layer"], unknown["head"], strict=True):
        axes.add_patch(Rectangle((layer - 0.5, head - 0.5), 1, 1, **hatched, gid="not computed"))
    axes.set_aspect("equal")
    axes.invert_yaxis()
    dress(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    axes.set(xlabel="layer", ylabel="head")
    axes.set_title(str(heads.attrs.get("model", "attention heads")), fontsize=12, color=INK, loc="left")
    known = COLUMNS.get(column)
    unit = f"\n({known.unit})" if known and len(known.unit) < 30 else ""
    bar = colour_bar(figure, colours, axes, f"{column}{unit}", whole=False)
    note = _mark_null(bar, heads, column)
    entries = [(Patch(**hatched), f"not computed: {len(unknown)}")] if len(unknown) else []
    legend_below(figure, entries, [note], ax=ax)
    return figure


def _colours(values: pd.Series, column: str) -> ScalarMappable:
    known = COLUMNS.get(column)
    finite = values.to_numpy(float)[np.isfinite(values.to_numpy(float))]
    negative = known.signed if known else bool((finite < 0).any())
    if negative and len(finite):
        reach = float(np.abs(finite).max()) or 1.0
        return ScalarMappable(Normalize(-reach, reach), _SIGNED)
    return sequential_colours(values)


def _mark_null(bar: Axes, heads: pd.DataFrame, column: str) -> str | None:
    """Draw line and band of the null on the colour bar; returns the note about them, None without a null."""
    metric = column.removesuffix("_z")
    null = null_band(heads, metric)
    if null is None:
        return None
    centre, spread = (0.0, 1.0) if column != metric else null
    low, high = bar.get_ylim()
    if not low <= centre <= high:
        return f"null: {two_decimals(centre)}, off this scale"
    below, above = max(low, centre - 2 * spread), min(high, centre + 2 * spread)
    bar.axhspan(below, above, 0.0, 0.4, color="white", linewidth=0, gid="null band")
    bar.axhline(centre, color="white", linewidth=3.2, gid="null halo")
    bar.axhline(centre, color=INK, linewidth=1.4, gid="null mean")
    origin = "by definition" if column != metric else "medians over the heads' own nulls"
    return f"line and white band on the colour bar: null, {centre:.3g} ± {2 * spread:.2g} (2 sd), {origin}"
