"""The exclusion index of heads against the spread of their logits."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tlspectral.plots.positional.plane import draw_heads
from tlspectral.plots.positional.rows import require_heads, without_nan
from tlspectral.plots.style import dress, legend_below, one_panel

_INDEX = "exclusion index"
_ENDS = "0 symbolic, 1 positional"


def exclusion_plane(scores: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Draw every head by its exclusion index (across) and the standard deviation of its logits (up, logarithmic).

    The index spreads where the two scores crowd near 1. Far below a deviation of 1 the softmax is nearly flat, and the
    index speaks of logits that hardly matter.

    Args:
        scores: table of `positional_symbolic`: `layer, head, exclusion_index, logit_std`. Rows with
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
