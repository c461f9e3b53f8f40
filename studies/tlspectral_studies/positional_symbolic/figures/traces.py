"""The figure of one head's attention before and after swaps."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlspectral.plots.positional_planes import without_nan
from tlspectral.plots.style import GREY, INK, PALE, dress, legend_below, new_figure
from tlspectral.selection.node_names import head_name
from tlspectral.tables.schema import require, require_one_row

_TRACE = ["layer", "head", "frequency", "swap_i", "swap_j", "block", "before", "after"]
_LOOKS: dict[str, dict[str, Any]] = {
    "before": {"color": GREY, "marker": "o", "markersize": 5, "markerfacecolor": "white", "linewidth": 1},
    "after": {"color": INK, "marker": "o", "markersize": 3, "linewidth": 1.4},
}
_MOST_SWAPS = 6


def attention_traces(traces: pd.DataFrame) -> Figure:
    """Attention of one head's last query over the blocks, before and after swaps of two of them.

    One row of panels per frequency, one column per swap. Where the head is positional the trace after the swap lies on
    the one before; where it is symbolic the two shaded slots have exchanged their weights.

    Args:
        traces: `layer, head, frequency, swap_i, swap_j, block, before, after` of
            the study's `traces.attention_traces`, of one head; `before` and `after` are mean weights per
            token of the block in that slot, NaN in `frequency` stands for the whole head. Rows with NaN in `before`
            or `after` are left out and counted. Pass `traces[traces["block"] > 0]` where a sink in block 0 dwarfs the
            others.

    Raises:
        ValueError: a needed column is missing, there are no rows, more than one head, more than 6 swaps, or several
            rows for one block in one swap.

    Source: PS, "Decoupling Positional and Symbolic Attention Behavior", section 3.3, Figure 1E.

    What it does not establish: that the head behaves so under other swaps, or on other prompts. The scores are means
    over swaps; the traces are what goes into them.
    """
    require(traces, _TRACE, "tlspectral_studies.positional_symbolic.traces.attention_traces")
    heads = traces[["layer", "head"]].drop_duplicates()
    if len(heads) > 1:
        names = ", ".join(head_name(layer, head) for layer, head in heads.head(3).itertuples(index=False))
        raise ValueError(f"the traces are of {len(heads)} heads ({names}): give the rows of one")
    require_one_row(traces, _TRACE[:6], "give one row per frequency, swap and block")
    shown, note = without_nan(traces, ["before", "after"])
    swaps = sorted({(int(i), int(j)) for i, j in zip(traces["swap_i"], traces["swap_j"], strict=True)})
    if len(swaps) > _MOST_SWAPS:
        raise ValueError(f"{len(swaps)} swaps: give the rows of at most {_MOST_SWAPS}")
    whole = [None] if traces["frequency"].isna().any() else []
    frequencies = [*whole, *sorted(int(index) for index in traces["frequency"].dropna().unique())]

    figure = new_figure(1.75 * len(swaps) + 1.6, 1.35 * len(frequencies) + 1.1)
    grid = figure.subplots(len(frequencies), len(swaps), sharex=True, sharey="row", squeeze=False)
    for frequency, row in zip(frequencies, grid, strict=True):
        same = shown["frequency"].isna() if frequency is None else shown["frequency"] == frequency
        highest = shown.loc[same, ["before", "after"]].max(axis=None)
        for swap, axes in zip(swaps, row, strict=True):
            rows = shown.loc[same & (shown["swap_i"] == swap[0]) & (shown["swap_j"] == swap[1])]
            _draw_trace(axes, rows.sort_values("block"), swap)
            axes.set_ylim(0, 1.12 * highest if highest > 0 else 1)
        row[0].set_ylabel("whole head" if frequency is None else f"frequency {frequency}")
    for swap, axes in zip(swaps, grid[0], strict=True):
        axes.set_title(f"{swap[0]} ↔ {swap[1]}", fontsize=10, color=INK)
    for axes in grid[-1]:
        axes.set_xlabel("slot of the block")
    figure.suptitle(f"{head_name(*heads.iloc[0])}: swaps of two blocks", fontsize=11, color=INK)
    figure.supylabel("mean attention per token", fontsize=10, color=INK)
    entries = [
        *((Line2D([], [], **look), column) for column, look in _LOOKS.items()),
        (Patch(facecolor=PALE), "swapped blocks"),
    ]
    legend_below(figure, entries, [note], columns=3)
    return figure


def _draw_trace(axes: Axes, table: pd.DataFrame, swap: tuple[int, int]) -> None:
    for block in swap:
        axes.axvspan(block - 0.4, block + 0.4, color=PALE, linewidth=0, zorder=0, gid="swapped block")
    for column, look in _LOOKS.items():
        axes.plot(table["block"], table[column], **look, gid=column)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
    dress(axes)
