"""Figures of an ablation: effects of heads with their errors, and kernels before and after."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tlspectral.plots.style import GREY, INK, dress, new_figure, one_panel

_INTACT, _ABLATED = "#1b6ca8", "#c8102e"


def ablation_effects(sweep: pd.DataFrame, heads: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Change of the loss when a part of each head is removed, largest first, with one standard error.

    Args:
        sweep: of `ablation_sweep`; heads without a measured effect are left out. Its control, if it has one, is drawn
            beside the effect.
        heads: of `analyze_heads`, for the previous-token score, which is written after each name.
        ax: matplotlib Axes to draw into; None makes a new figure.
    """
    table = sweep.dropna(subset="delta").merge(heads[["layer", "head", "prev"]], on=["layer", "head"])
    table = table.sort_values("delta", ignore_index=True)
    figure, axes = one_panel(ax, 6.4, 1.2 + 0.28 * len(table))
    heights = np.arange(len(table))
    axes.axvline(0, color=GREY, linewidth=0.8)
    replaced = f" ({sweep.attrs['replace']})" if "replace" in sweep.attrs else ""
    removed = f"{table['part'].iloc[0]} removed{replaced}"
    axes.errorbar(table["delta"], heights, xerr=table["delta_se"], fmt="o", color=_ABLATED, label=removed)
    if "control_delta" in table:
        control, error = table["control_delta"], table["control_delta_se"]
        of_heads = table["part"].iloc[0] in ("output", "long_range")
        label = "the same of other heads of the layer" if of_heads else "random part of equal size removed"
        look: dict[str, Any] = {"color": GREY, "markersize": 4, "label": label}
        axes.errorbar(control, heights - 0.2, xerr=error, fmt="s", **look)
    names = [f"{name}  (prev {prev:.2f})" for name, prev in zip(table["name"], table["prev"], strict=True)]
    axes.set_yticks(heights, names)
    task = sweep.attrs.get("task", "induction")
    changed = "the loss (nats)" if task in ("induction", "language") else f"the {task}"
    bars = ", bars: one standard error over sequences" if table["delta_se"].notna().any() else ""
    axes.set_xlabel(f"change of {changed}{bars}")
    dress(axes)
    axes.legend(frameon=False, loc="best")
    return figure


def kernel(intact: pd.DataFrame, ablated: pd.DataFrame | None = None, *, ax: Axes | None = None) -> Figure:
    """Mean attention score against the offset of the key, one panel per head, intact and ablated.

    Args:
        intact: of `relative_position_kernel`.
        ablated: the same inside `ablate(...)`, for the same heads; None draws the intact kernel alone.
        ax: matplotlib Axes to draw into, for the kernel of one head; None makes a new figure.

    Raises:
        ValueError: `ax` is given, and the kernels are of several heads.
    """
    groups = list(intact[["layer", "head"]].drop_duplicates().itertuples(index=False, name=None))
    if ax is not None and len(groups) > 1:
        raise ValueError(f"the kernels are of {len(groups)} heads, a panel each: give ax the rows of one, or no ax")
    if len(groups) == 1:
        figure, axes = one_panel(ax, 3.8, 2.8)
        panels = [axes]
    else:
        figure = new_figure(3.2 * len(groups) + 0.6, 2.8)
        panels = figure.subplots(1, len(groups), sharex=True).tolist()
    for axes, (layer, head) in zip(panels, groups, strict=True):
        table = intact[(intact["layer"] == layer) & (intact["head"] == head)]
        axes.plot(table["offset"], table["score"], "o-", markersize=3.5, color=_INTACT, label="intact")
        if ablated is not None:
            same = ablated[(ablated["layer"] == layer) & (ablated["head"] == head)]
            axes.plot(same["offset"], same["score"], "s--", markersize=3.5, color=_ABLATED, label="ablated")
        axes.set_title(f"L{layer}H{head}", color=INK)
        axes.set_xlabel("offset of the key (tokens)")
        dress(axes)
    panels[0].set_ylabel("mean score before the softmax")
    panels[0].legend(frameon=False)
    return figure
