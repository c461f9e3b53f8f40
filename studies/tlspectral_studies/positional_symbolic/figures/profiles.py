"""Both scores of heads, frequency by frequency."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tlspectral.plots.positional_planes import POSITIONAL, SCORES, SYMBOLIC, without_nan
from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, PALE, dress, legend_below, new_figure
from tlspectral.selection.heads_as_written import Head, Heads, pair_in_table, pairs_in_table
from tlspectral.selection.node_names import head_name
from tlspectral.tables.schema import require, require_one_row

_KEYS = ["layer", "head", "frequency"]
_ONE_ROW = "give one row per head and frequency"
FREQUENCY_AXIS = "frequency index (0 = fastest)"


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
    require_frequencies(frequencies)
    pairs = pairs_in_table(heads, frequencies, "the table")
    tables = {pair: of_head(frequencies, pair).sort_values("frequency") for pair in pairs}
    if not tables:
        raise ValueError("no heads are named: give at least one")
    _, note = without_nan(pd.concat(tables.values()), SCORES)
    with_strip = "logit_std" in frequencies

    columns = min(len(tables), 2)
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
            lowest.set_xlabel(FREQUENCY_AXIS if columns == 1 else "frequency index")
            lowest.xaxis.label.set(color=INK, fontsize=10)
        wavelength_axis(axes, table, label=row == 0)
    legend_below(figure, score_entries(1.8, (4.0, 1.2)), [note], columns=2)
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
    ticks = [tick for tick in ticked_frequencies(table) if not np.isnan(of_index[tick])]
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
    frequency_ticks(axes, table)


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


def ticked_frequencies(table: pd.DataFrame) -> list[int]:
    """About five indices of the table, from the first to the last."""
    indices = sorted(int(index) for index in table["frequency"].unique())
    step = max(round(len(indices) / 4), 1)
    ticks = indices[::step]
    if len(indices) - 1 - indices.index(ticks[-1]) > step / 2:
        ticks.append(indices[-1])
    return ticks


def frequency_ticks(axes: Axes, table: pd.DataFrame) -> None:
    """Write the indices of `ticked` under an axis of frequencies."""
    ticks = ticked_frequencies(table)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _in_tokens(wavelength: float) -> str:
    """A number of tokens in short: 6.3, 41, 2.1k, 630k, 4M."""
    if np.isinf(wavelength):
        return "∞"
    unit, letter = (1e6, "M") if wavelength >= 999_500 else (1e3, "k") if wavelength >= 999.5 else (1.0, "")
    amount = wavelength / unit
    return f"{amount:.2g}{letter}" if amount < 9.95 else f"{amount:.0f}{letter}"


def of_head(table: pd.DataFrame, head: Head) -> pd.DataFrame:
    """The rows of one head. Raises ValueError where it has none."""
    layer, index = pair_in_table(head, table, "the table")
    rows = table.loc[(table["layer"] == layer) & (table["head"] == index)]
    if rows.empty:
        raise ValueError(f"{head_name(layer, index)} has no row in the table: give one of the heads that it holds")
    return rows


def name_of(rows: pd.DataFrame) -> str:
    """The name of the head that all rows are of."""
    return head_name(int(rows["layer"].iloc[0]), int(rows["head"].iloc[0]))


def require_frequencies(frequencies: pd.DataFrame) -> None:
    """Refuse a table without scores of single frequencies, or with two rows of one. Raises ValueError."""
    require(frequencies, [*_KEYS, *SCORES], "positional_symbolic(..., per_frequency=True)")
    require_one_row(frequencies, _KEYS, _ONE_ROW)


def score_entries(width: float, dashes: tuple[float, float]) -> list[tuple[Line2D, str]]:
    """Legend entries of both scores drawn as lines."""
    return [
        (Line2D([], [], color=BLUE, linewidth=width), POSITIONAL),
        (Line2D([], [], color=ORANGE, linewidth=width, linestyle=(0, dashes)), SYMBOLIC),
    ]
