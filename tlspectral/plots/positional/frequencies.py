"""Heads frequency by frequency: profiles of both scores, the path over the plane, and norms."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tlspectral.plots.labels import name_points
from tlspectral.plots.positional.plane import POSITIONAL, SCORES, SYMBOLIC, circle_entry, plane_axes
from tlspectral.plots.positional.rows import of_head, require_one_row_per, without_nan
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
from tlspectral.selection import Head, Heads, head_name, head_pair, head_pairs
from tlspectral.tables.required import require

_KEYS = ["layer", "head", "frequency"]
_ONE_ROW = "give one row per head and frequency"
_FREQUENCY_AXIS = "frequency index (0 = fastest)"


def frequency_profile(frequencies: pd.DataFrame, heads: Heads) -> Figure:
    """Both scores of some heads against the frequency index, with the spread of the logits in a strip beneath.

    The strip is logarithmic, with a line at 1. Far below it a frequency's pattern is flat, and both scores are high
    whatever the head does.

    Args:
        frequencies: `layer, head, frequency, s_pos, s_sym` of `positional_symbolic(..., per_frequency=True)`. Used
            where there: `logit_std` (standard deviation of that frequency's logits over the keys) for the strip, on
            one scale for all heads; `wavelength` (tokens) or `theta` (radians per token), which `frequency_table` has,
            for a second axis on top. Rows with NaN are left out and counted.
        heads: pairs (layer, head), names such as "L12H0", or rows of a table; one panel each.

    Raises:
        ValueError: a needed column is missing, there are no rows, a head has several per frequency, or none.

    Source: PS, "Decoupling Positional and Symbolic Attention Behavior", section 3.3, Figure 1C, and Figure 6 right.

    What it does not establish: what the whole head does. Its softmax is taken over the sum of all frequencies, in
    which those with large logits outweigh the others.
    """
    _check(frequencies)
    tables = {pair: of_head(frequencies, pair).sort_values("frequency") for pair in head_pairs(heads)}
    if not tables:
        raise ValueError("no heads are named: give at least one")
    _, note = without_nan(pd.concat(tables.values()), SCORES)
    with_strip = "logit_std" in frequencies

    columns = min(len(tables), 3)
    rows = -(-len(tables) // columns)
    figure = new_figure(2.5 * columns + 0.9 if columns > 1 else 4.2, (2.6 if with_strip else 2.1) * rows + 0.6)
    per_head = 2 if with_strip else 1
    grid = figure.add_gridspec(rows * per_head, columns, height_ratios=[3, 1][:per_head] * rows)
    limits = _spread_limits(pd.concat(tables.values())["logit_std"]) if with_strip else (0.1, 10.0)
    for number, (pair, table) in enumerate(tables.items()):
        row, column = divmod(number, columns)
        axes = figure.add_subplot(grid[row * per_head, column])
        _draw_profile(axes, table)
        axes.set_title(head_name(*pair), fontsize=10, color=INK, fontweight="bold")
        lowest = axes
        if with_strip:
            lowest = figure.add_subplot(grid[row * per_head + 1, column], sharex=axes)
            _draw_strip(lowest, table, limits)
            axes.tick_params(labelbottom=False)
            lowest.set_ylabel("logit sd" if column == 0 else "")
        axes.set_ylabel("score (cosine)" if column == 0 else "")
        if number + columns >= len(tables):
            lowest.set_xlabel(_FREQUENCY_AXIS if columns == 1 else "frequency index")
            lowest.xaxis.label.set(color=INK, fontsize=10)
        wavelength_axis(axes, table, label=row == 0)
    legend_below(figure, _score_entries(1.8, (4.0, 1.2)), [note], columns=2)
    return figure


def frequency_grid(frequencies: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Profiles of all heads at once: one cell per head, layers down and heads across.

    In each cell the frequency index runs from left (0, the fastest) to right and both scores from 0 at the bottom to 1
    at the top. Gaps in a line are rows with NaN, which are counted, or frequencies without a row.

    Args:
        frequencies: `layer, head, frequency, s_pos, s_sym` of `positional_symbolic(..., per_frequency=True)`.
        ax: matplotlib Axes to draw into; None makes a new figure.

    Raises:
        ValueError: a needed column is missing, there are no rows, or a head has several per frequency.

    Source: PS, appendix B.5, Figure 5.

    What it does not establish: that a frequency with both scores high does both things. Look at its `logit_std`, which
    `frequency_profile` draws.
    """
    _check(frequencies)
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
    legend_below(figure, _score_entries(1.6, (3.0, 0.8)), [cell, note], columns=2, ax=ax)
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
    _check(frequencies)
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
    axes.set_title(f"{head_name(*head_pair(head))}, frequency by frequency", fontsize=11, color=INK, loc="left")
    colour_bar(figure, colours, axes, _FREQUENCY_AXIS, whole=True)
    legend_below(figure, [circle_entry()], [note], ax=ax)
    if len(shown):
        ticked = np.flatnonzero(shown["frequency"].isin(_ticks(shown)))
        names = [str(index) for index in shown["frequency"].iloc[ticked]]
        name_points(figure, axes, names, points[ticked], points, colours=[INK] * len(names), gid="named frequency")
    return figure


def frequency_norms(norms: pd.DataFrame, head: Head) -> Figure:
    """Norms of one head's logits and keys at each frequency.

    Args:
        norms: `layer, head, frequency, logit_norm, key_norm` of `tlspectral.positional.traces.frequency_norms`. Used
            where there: `wavelength` (tokens) or `theta` (radians per token), which `frequency_table` has, for a second
            axis on top. Rows with NaN are left out and counted.
        head: the pair (layer, head) or a name such as "L12H0".

    Raises:
        ValueError: a needed column is missing, there are no rows, the head has several per frequency, or none.

    Source: PS, section 3.3, Figure 1D.

    What it does not establish: that a frequency with a large norm decides the pattern. A logit that is large and the
    same for all keys changes nothing in the softmax.
    """
    require(norms, [*_KEYS, "logit_norm", "key_norm"], "tlspectral.positional.traces.frequency_norms")
    require_one_row_per(norms, _KEYS, _ONE_ROW)
    table = of_head(norms, head).sort_values("frequency")
    shown, note = without_nan(table, ["logit_norm", "key_norm"])
    figure = new_figure(4.2, 3.8)
    panels: list[Axes] = figure.subplots(2, 1, sharex=True).tolist()
    for axes, column, label in zip(panels, ("logit_norm", "key_norm"), ("logits", "keys"), strict=True):
        axes.bar(shown["frequency"], shown[column], width=0.8, color=GREY, gid=column)
        axes.set_ylabel(f"norm of {label}\n(rms over keys)")
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        dress(axes)
    _frequency_ticks(panels[-1], table)
    panels[-1].set_xlabel(_FREQUENCY_AXIS)
    panels[0].set_title(head_name(*head_pair(head)), fontsize=11, color=INK, loc="left")
    wavelength_axis(panels[0], table, label=True)
    legend_below(figure, [], [note])
    return figure


def wavelength_axis(axes: Axes, table: pd.DataFrame, *, label: bool) -> None:
    """Draw a second axis on top, in tokens per full rotation; none without `wavelength` or `theta`."""
    if "wavelength" in table:
        wavelengths = table["wavelength"].to_numpy(float)
    elif "theta" in table:
        with np.errstate(divide="ignore"):
            wavelengths = 2 * np.pi / np.abs(table["theta"].to_numpy(float))
    else:
        return
    of_index = dict(zip(table["frequency"], wavelengths, strict=True))
    ticks = [tick for tick in _ticks(table) if not np.isnan(of_index[tick])]
    above = axes.secondary_xaxis("top")
    above.set_xticks(ticks, [_in_tokens(of_index[tick]) for tick in ticks])
    above.spines["top"].set_visible(False)
    above.tick_params(length=2, color=GREY, labelcolor=GREY, labelsize=8, pad=1)
    if label:
        above.set_xlabel("wavelength (tokens)", color=GREY, fontsize=9)


def _draw_profile(axes: Axes, table: pd.DataFrame) -> None:
    for score, colour, dashes in (("s_pos", BLUE, "solid"), ("s_sym", ORANGE, (0, (4, 1.2)))):
        axes.plot(table["frequency"], table[score], color=colour, linewidth=1.8, linestyle=dashes, gid=score)
    axes.set(ylim=(min(0.0, float(table[SCORES].min(axis=None))) - 0.03, 1.05))
    axes.set(yticks=(0, 0.5, 1), yticklabels=("0", ".5", "1"))
    dress(axes)
    _frequency_ticks(axes, table)


def _draw_strip(axes: Axes, table: pd.DataFrame, limits: tuple[float, float]) -> None:
    spread = table["logit_std"].clip(lower=limits[0])
    look = {"color": PALE, "edgecolor": GREY, "linewidth": 0.8, "gid": "logit_std"}
    axes.fill_between(table["frequency"], limits[0], spread, **look)
    axes.axhline(1, color=GREY, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set(yscale="log", ylim=limits)
    low, high = (round(np.log10(limit)) for limit in limits)
    ticks = 10.0 ** np.unique([low, 0, high])
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    dress(axes)


def _spread_limits(spreads: pd.Series) -> tuple[float, float]:
    """Powers of ten that enclose 1 and all spreads; not below 0.001, where every pattern is flat."""
    positive = spreads.loc[spreads > 0].to_numpy()
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (1.0, 1.0)
    return max(10.0 ** min(np.floor(np.log10(low)), -1), 1e-3), 10.0 ** max(np.ceil(np.log10(high)), 1)


def _ticks(table: pd.DataFrame) -> list[int]:
    """About five indices of the table, from the first to the last."""
    indices = sorted(int(index) for index in table["frequency"].unique())
    step = max(round(len(indices) / 4), 1)
    ticks = indices[::step]
    if len(indices) - 1 - indices.index(ticks[-1]) > step / 2:
        ticks.append(indices[-1])
    return ticks


def _frequency_ticks(axes: Axes, table: pd.DataFrame) -> None:
    ticks = _ticks(table)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _in_tokens(wavelength: float) -> str:
    """A number of tokens in short: 6.3, 41, 2.1k, 630k, 4M."""
    if np.isinf(wavelength):
        return "∞"
    unit, letter = (1e6, "M") if wavelength >= 999_500 else (1e3, "k") if wavelength >= 999.5 else (1.0, "")
    amount = wavelength / unit
    return f"{amount:.2g}{letter}" if amount < 9.95 else f"{amount:.0f}{letter}"


def _check(frequencies: pd.DataFrame) -> None:
    require(frequencies, [*_KEYS, *SCORES], "positional_symbolic(..., per_frequency=True)")
    require_one_row_per(frequencies, _KEYS, _ONE_ROW)


def _score_entries(width: float, dashes: tuple[float, float]) -> list[tuple[Line2D, str]]:
    """Legend entries of both scores drawn as lines."""
    return [
        (Line2D([], [], color=BLUE, linewidth=width), POSITIONAL),
        (Line2D([], [], color=ORANGE, linewidth=width, linestyle=(0, dashes)), SYMBOLIC),
    ]
