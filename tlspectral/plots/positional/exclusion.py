"""The exclusion index of heads: against the spread of their logits, and over tasks."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from tlspectral.plots.positional.plane import draw_heads
from tlspectral.plots.positional.rows import require_heads, without_nan
from tlspectral.plots.style import INK, colour_bar, draw_cells, dress, legend_below, new_figure, one_panel

_INDEX = "exclusion index"
_ENDS = "0 symbolic, 1 positional"


def exclusion_plane(scores: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Draw every head by its exclusion index (across) and the standard deviation of its logits (up, logarithmic).

    The index spreads where the two scores crowd near 1. Far below a deviation of 1 the softmax is nearly flat, and the
    index speaks of logits that hardly matter.

    Args:
        scores: table of `positional_symbolic`, or of a profile: `layer, head, exclusion_index, logit_std`. Rows with
            NaN, and logits without any spread, are left out and counted.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a needed column is missing, there are no rows, or a head has several.

    Source: PS, "Decoupling Positional and Symbolic Attention Behavior", Theorem 1.

    What it does not establish: that a head uses what its index says, nor that its output depends on it.
    """
    columns = ["exclusion_index", "logit_std"]
    require_heads(scores, columns, "positional_symbolic")
    spread = scores["logit_std"].where(scores["logit_std"] > 0)
    shown, note = without_nan(scores.assign(logit_std=spread), columns)
    figure, axes = one_panel(ax, 5.4, 4.4)
    draw_heads(figure, axes, np.asarray(shown[columns], dtype=float), shown, scores, "layer", whole=True)
    axes.set(xlim=(-0.03, 1.03), yscale="log", xlabel=f"{_INDEX} ({_ENDS})", ylabel="standard deviation of the logits")
    dress(axes)
    legend_below(figure, [], [note], ax=ax)
    return figure


def heads_over_tasks(tables: Mapping[str, pd.DataFrame], column: str = "exclusion_index") -> Figure:
    """One column of a model's heads on several tasks: tasks down, heads across in the order of layers.

    Args:
        tables: by name of the task, the `heads` of profiles of one model: `layer, head` and the column. Heads that a
            table lacks, or with NaN, are blank.
        column: `"exclusion_index"`, `"s_pos"` or `"s_sym"`, from 0 to 1.

    Raises:
        ValueError: no table, a needed column is missing, there are no rows, or a head has several.

    What it does not establish: a difference between tasks: `tlspectral.positional.profile_contrast` has the intervals.
    """
    if not tables:
        raise ValueError("no table is given: give at least one, by the name of its task")
    for table in tables.values():
        require_heads(table, [column], "positional_symbolic_profile")
    by_task = pd.DataFrame({name: table.set_index(["layer", "head"])[column] for name, table in tables.items()})
    by_task = by_task.sort_index()
    figure = new_figure(7.2, 0.34 * len(by_task.columns) + 1.3)
    axes = figure.subplots()
    colours = ScalarMappable(Normalize(0, 1), colormaps["cividis"])
    draw_cells(axes, by_task.to_numpy(float).T, colours, column)
    axes.set_yticks(range(len(by_task.columns)), list(map(str, by_task.columns)))
    axes.invert_yaxis()
    layers = by_task.index.get_level_values("layer").to_numpy()
    starts = np.flatnonzero(np.diff(layers, prepend=layers[0] - 1))
    step = max(1, len(starts) // 10)
    axes.set_xticks(starts[::step], list(map(str, layers[starts[::step]])))
    axes.set_xlabel("first head of layer")
    axes.set_title(_ENDS if column == "exclusion_index" else column, fontsize=9, color=INK, loc="left")
    dress(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    colour_bar(figure, colours, axes, _INDEX if column == "exclusion_index" else column, whole=False)
    legend_below(figure, [], [])
    return figure
