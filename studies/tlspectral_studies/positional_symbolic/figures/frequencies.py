"""Heads frequency by frequency: profiles of all heads, the path of one over the plane, and norms.

All refuse a table without rows or a needed column, or with two rows where one is drawn (ValueError).
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tlspectral.plots.labels import name_points
from tlspectral.plots.positional_planes import SCORES, circle_entry, plane_axes, without_nan
from tlspectral.plots.style import (
    BLUE,
    GREY,
    INK,
    ORANGE,
    PALE,
    colour_bar,
    draw_dots,
    dress,
    legend_below,
    new_figure,
    one_panel,
    sequential_colours,
)
from tlspectral.selection.heads_as_written import Head
from tlspectral.tables.schema import require, require_one_row
from tlspectral_studies.positional_symbolic.figures.profiles import (
    FREQUENCY_AXIS,
    frequency_ticks,
    name_of,
    of_head,
    require_frequencies,
    score_entries,
    ticked_frequencies,
    wavelength_axis,
)

_KEYS = ["layer", "head", "frequency"]


def frequency_grid(frequencies: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Profiles of all heads at once: one cell per head, layers down and heads across.

    In each cell the frequency index runs from left (0, the fastest) to right and both scores from 0 at the bottom to 1
    at the top. Gaps in a line are rows with NaN, which are counted, or frequencies without a row.

    Args:
        frequencies: `layer, head, frequency, s_pos, s_sym` of `positional_symbolic(..., per_frequency=True)`.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Source: PS, appendix B.5, Figure 5.

    What it does not establish: that a frequency with both scores high does both things. Look at its `logit_std`, which
    `frequency_profile` draws.
    """
    require_frequencies(frequencies)
    _, note = without_nan(frequencies, SCORES)
    n_layers, n_heads = int(frequencies["layer"].max()) + 1, int(frequencies["head"].max()) + 1
    low, high = int(frequencies["frequency"].min()), int(frequencies["frequency"].max())
    index = np.arange(low, high + 1)
    across = 0.06 + 0.88 * (index - low) / max(high - low, 1)

    width, height = np.clip(0.62 * n_heads + 0.9, 3.4, 9.0), np.clip(0.27 * n_layers + 1.3, 2.2, 11)
    figure, axes = one_panel(ax, float(width), float(height))
    for score, colour, dashes in (("s_pos", BLUE, "solid"), ("s_sym", ORANGE, (0, (3, 0.8)))):
        values = frequencies.pivot(index=["layer", "head"], columns="frequency", values=score).reindex(columns=index)
        layers = values.index.get_level_values("layer").to_numpy(float)[:, None]
        heads = values.index.get_level_values("head").to_numpy(float)[:, None]
        heights = layers + 0.92 - 0.84 * values.to_numpy(float)
        lines = np.stack([heads + across, heights], axis=-1)
        axes.add_collection(LineCollection(list(lines), colors=colour, linewidths=1.0, linestyles=[dashes], gid=score))
    axes.hlines(np.arange(n_layers + 1), 0, n_heads, color=PALE, linewidth=0.6, zorder=0)
    axes.vlines(np.arange(n_heads + 1), 0, n_layers, color=PALE, linewidth=0.6, zorder=0)
    axes.set(xlim=(0, n_heads), ylim=(n_layers, 0), xlabel="head", ylabel="layer")
    for axis, count, most in ((axes.xaxis, n_heads, 16), (axes.yaxis, n_layers, 32)):
        labelled = np.arange(0, count, -(-count // most))
        axis.set_ticks(labelled + 0.5, [str(index) for index in labelled])
    dress(axes)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    cell = f"in a cell: frequency {low} (fast) to {high} (slow) across,\nscore 0 to 1 up"
    legend_below(figure, score_entries(1.6, (3.0, 0.8)), [cell, note], columns=2, ax=ax)
    return figure


def frequency_path(frequencies: pd.DataFrame, head: Head, *, ax: Axes | None = None) -> Figure:
    """Path of one head over the positional-symbolic plane as the frequency goes from fast to slow.

    Args:
        frequencies: `layer, head, frequency, s_pos, s_sym` of `positional_symbolic(..., per_frequency=True)`. Rows with
            NaN are left out and counted.
        head: the pair (layer, head) or a name such as "L12H0".
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a needed column is missing, there are no rows, the head has several per frequency, or none.

    Source: PS, section 3.3, Figure 1F.

    What it does not establish: which frequencies matter to the head. All of them are dots of one size here;
    `frequency_norms` shows how much each adds to the scores.
    """
    require_frequencies(frequencies)
    table = of_head(frequencies, head).sort_values("frequency")
    shown, note = without_nan(table, SCORES)
    points = np.asarray(shown[SCORES], dtype=float)
    figure, axes = one_panel(ax, 5.0, 5.0)
    colours = sequential_colours(table["frequency"])
    index = np.asarray(shown["frequency"], dtype=float)
    steps, between = np.stack([points[:-1], points[1:]], axis=1), colours.to_rgba((index[:-1] + index[1:]) / 2)
    axes.add_collection(LineCollection(list(steps), colors=between, linewidths=1.4, alpha=0.6, zorder=2, gid="path"))
    draw_dots(axes, points, 30, colours.to_rgba(index), "frequencies")
    plane_axes(axes, points)
    axes.set_title(f"{name_of(table)}, frequency by frequency", fontsize=11, color=INK, loc="left")
    colour_bar(figure, colours, axes, FREQUENCY_AXIS, whole=True)
    legend_below(figure, [circle_entry()], [note], ax=ax)
    if len(shown):
        ticked = np.flatnonzero(shown["frequency"].isin(ticked_frequencies(shown)))
        names = [str(index) for index in shown["frequency"].iloc[ticked]]
        name_points(figure, axes, names, points[ticked], points, colours=[INK] * len(names), gid="named frequency")
    return figure


def frequency_norms(norms: pd.DataFrame, head: Head) -> Figure:
    """Norms of one head's logits and keys at each frequency.

    Args:
        norms: `layer, head, frequency, logit_norm, key_norm` of the study's `traces.frequency_norms`. Used where there:
            `wavelength` (tokens) or `theta` (radians per token), which `frequency_table` has, for a second
            axis on top. Rows with NaN are left out and counted.
        head: the pair (layer, head) or a name such as "L12H0".

    Raises:
        ValueError: a needed column is missing, there are no rows, the head has several per frequency, or none.

    Source: PS, section 3.3, Figure 1D.

    What it does not establish: that a frequency with a large norm decides the pattern. A logit that is large and the
    same for all keys changes nothing in the softmax.
    """
    require(norms, [*_KEYS, "logit_norm", "key_norm"], "tlspectral_studies.positional_symbolic.traces.frequency_norms")
    require_one_row(norms, _KEYS, "give one row per head and frequency")
    table = of_head(norms, head).sort_values("frequency")
    shown, note = without_nan(table, ["logit_norm", "key_norm"])
    figure = new_figure(4.2, 3.8)
    panels: list[Axes] = figure.subplots(2, 1, sharex=True).tolist()
    for axes, column, label in zip(panels, ("logit_norm", "key_norm"), ("logits", "keys"), strict=True):
        axes.bar(shown["frequency"], shown[column], width=0.8, color=GREY, gid=column)
        axes.set_ylabel(f"norm of {label}\n(rms over keys)")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        dress(axes)
    frequency_ticks(panels[-1], table)
    panels[-1].set_xlabel(FREQUENCY_AXIS)
    panels[0].set_title(name_of(table), fontsize=11, color=INK, loc="left")
    wavelength_axis(panels[0], table, label=True)
    legend_below(figure, [], [note])
    return figure
