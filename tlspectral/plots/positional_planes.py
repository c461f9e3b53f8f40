"""Figures of heads by their positional and symbolic scores, from tables of `tlspectral.positional`.

They follow "Decoupling Positional and Symbolic Attention Behavior" (PS), Figures 1, 3, 5, 6 and 7, in colours that
survive print and colour blindness.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from tlspectral.plots.labels import name_points
from tlspectral.plots.style import (
    GREY,
    INK,
    PALE,
    draw_heads,
    dress,
    legend_below,
    one_panel,
    two_decimals,
)
from tlspectral.selection.heads_as_written import Heads, pairs_in_table
from tlspectral.selection.node_names import head_name
from tlspectral.tables.schema import require, require_one_row

SCORES = ["s_pos", "s_sym"]
POSITIONAL = r"positional $s_\mathrm{pos}$"
SYMBOLIC = r"symbolic $s_\mathrm{sym}$"
POSITIONAL_AXIS = r"positional score $s_\mathrm{pos}$ (cosine)"
SYMBOLIC_AXIS = r"symbolic score $s_\mathrm{sym}$ (cosine)"


def positional_symbolic_plane(
    scores: pd.DataFrame, *, highlight: Heads | None = None, ax: Axes | None = None
) -> Figure:
    """Draw every head by its positional score (across) and its symbolic score (up), coloured by layer.

    >>> import pandas as pd, tlspectral as tls
    >>> heads = {"layer": [0, 1], "head": [0, 0]}
    >>> scores = pd.DataFrame({**heads, "s_pos": [0.9, 0.4], "s_sym": [0.5, 0.95]})
    >>> figure = tls.plots.positional_symbolic_plane(scores, highlight="L1H0")
    >>> figure.axes[0].get_title(loc="right")
    '2 heads'

    Use it to see which heads follow positions and which follow words ("Decoupling Positional and Symbolic Attention
    Behavior", section 3.3, Figure 1A). Two blocks of a prompt swap: s_pos is 1 if attention stays at its positions,
    s_sym is 1 if it follows the blocks. Both are near 1 if attention is even. The arc is the unit circle: for one swap
    no head can lie inside it, and a head with all weight on one block lies on it. A mean over swaps that disagree may
    lie inside.

    Args:
        scores: table of `tls.positional_symbolic`, one row per head. Needed columns: `layer, head, s_pos, s_sym`. Used
            if present: `s_pos_se, s_sym_se` for error bars of one standard error, and `scores.attrs["correlation"]` for
            a note. A note counts heads left out because a score is NaN.
        highlight: heads to name: "L12H0", (12, 0), a list of these, or rows such as `scores.nlargest(5, "s_sym")`.
            Default: none.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure: a dot per head; both axes are cosines, 0 to 1 for most heads.

    Raises:
        ValueError: a needed column is missing, the table has no rows, a head has several rows, or a head to name has no
            row.
        BadHead: `highlight` is not a head.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: that the two scores exclude each other in this model. The circle alone makes their correlation
    negative if attention is peaked, so compare it with its null.
    """
    require_heads(scores, SCORES, "positional_symbolic")
    shown, note = without_nan(scores, SCORES)
    named = _named_rows(scores, shown, highlight)

    figure, axes = one_panel(ax, 5.0, 5.0)
    _draw_errors(axes, shown)
    points = score_points(shown)
    draw_heads(figure, axes, points, shown, scores)
    plane_axes(axes, points)
    look: dict[str, Any] = {"fontsize": 9, "color": GREY, "zorder": 0, "gid": "what decides"}
    axes.text(0.02, 0.9, "the content\ndecides", ha="left", va="top", **look)
    axes.text(0.78, 0.02, "the position\ndecides", ha="right", va="bottom", **look)
    legend_below(figure, [circle_entry()], [_correlation(scores), "both near 1: neither decides", note], ax=ax)
    if len(named):
        names = list(map(head_name, named["layer"], named["head"]))
        name_points(figure, axes, names, score_points(named), points, colours=[INK] * len(names), gid="named head")
    return figure


def exclusion_plane(scores: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Draw every head by its exclusion index (across) and the standard deviation of its logits (up, logarithmic).

    >>> import pandas as pd, tlspectral as tls
    >>> columns = {"layer": 0, "head": [0, 1], "exclusion_index": [0.9, 0.2]}
    >>> scores = pd.DataFrame({**columns, "logit_std": [1.5, 0.3]})
    >>> tls.plots.exclusion_plane(scores).axes[0].get_xlabel()
    'exclusion index (0 symbolic, 1 positional)'

    Use it if flat attention brings both the positional and the symbolic score of many heads near 1. The index still
    distinguishes such heads: 0 if attention follows words, 1 if it follows positions ("Decoupling Positional and
    Symbolic Attention Behavior", Theorem 1). If the standard deviation is far below 1, the softmax is nearly flat and
    the logits hardly matter.

    Args:
        scores: table of `tls.positional_symbolic` with `layer, head, exclusion_index, logit_std`. A note counts heads
            left out because a value is NaN or `logit_std` is 0.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure: a dot per head, coloured by layer; across: index without unit; up: logits before the softmax.

    Raises:
        ValueError: a needed column is missing, the table has no rows, or a head has several rows.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: that the model's output depends on the head, or how the head behaves on another task.
    """
    columns = ["exclusion_index", "logit_std"]
    require_heads(scores, columns, "positional_symbolic")
    spread = scores["logit_std"].where(scores["logit_std"] > 0)
    shown, note = without_nan(scores.assign(logit_std=spread), columns)
    figure, axes = one_panel(ax, 5.4, 4.4)
    draw_heads(figure, axes, np.asarray(shown[columns], dtype=float), shown, scores)
    axes.set(
        xlim=(-0.03, 1.03),
        yscale="log",
        xlabel="exclusion index (0 symbolic, 1 positional)",
        ylabel="standard deviation of the logits",
    )
    dress(axes)
    legend_below(figure, [], [note], ax=ax)
    return figure


def plane_axes(axes: Axes, places: Float[np.ndarray, "points 2"], *, labels: bool = True) -> None:
    """Draw the arc of the unit circle into `axes`, and set equal scales and limits: 0 to 1, or lower if a point lies
    below 0.

    `places` are the points [points, 2] to be shown. `labels=False` leaves the names of the axes out.
    """
    angle = np.linspace(0, np.pi / 2, 91)
    axes.plot(np.cos(angle), np.sin(angle), color=GREY, linewidth=0.8, zorder=0, gid="unit circle")
    low = min(0.0, float(places.min())) if len(places) else 0.0
    axes.set(xlim=(low - 0.03, 1.03), ylim=(low - 0.03, 1.03), aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks((0, 0.25, 0.5, 0.75, 1), ("0", ".25", ".5", ".75", "1"))
    if labels:
        axes.set(xlabel=POSITIONAL_AXIS, ylabel=SYMBOLIC_AXIS)
    dress(axes)


def circle_entry() -> tuple[Line2D, str]:
    """Return the legend entry of the arc of the unit circle as (line, text)."""
    return Line2D([], [], color=GREY, linewidth=0.8), "unit circle: a single swap lies on it or beyond"


def _draw_errors(axes: Axes, shown: pd.DataFrame) -> None:
    """Draw into `axes` error bars of one standard error around the heads in `shown`, from the columns s_pos_se and
    s_sym_se; draw none if a column is missing. A head whose error is NaN gets no bar.
    """
    if "s_pos_se" not in shown or "s_sym_se" not in shown:
        return
    across, up = (shown[f"{score}_se"].fillna(0) for score in SCORES)
    look: dict[str, Any] = {"fmt": "none", "ecolor": PALE, "elinewidth": 0.9, "zorder": 1}
    bars = axes.errorbar(shown["s_pos"], shown["s_sym"], xerr=across, yerr=up, **look)
    for line in bars[2]:
        line.set_gid("standard errors")


def _correlation(scores: pd.DataFrame) -> str | None:
    """Return a text for the figure with Pearson's r of the two scores over heads, its mean and standard deviation under
    the null, and its percentile; None if `scores.attrs` have no correlation.
    """
    stats = scores.attrs.get("correlation") or {}
    if stats.get("pearson") is None:
        return None
    text = f"Pearson r of the two scores: {two_decimals(stats['pearson'])}"
    if stats.get("null_mean") is None or stats.get("null_sd") is None:
        return text
    text += f"\nnull, a coin per head: {two_decimals(stats['null_mean'])} ± {stats['null_sd']:.2g} (1 sd)"
    return text if stats.get("null_share") is None else f"{text}; r at percentile {100 * stats['null_share']:.3g}"


def _named_rows(scores: pd.DataFrame, shown: pd.DataFrame, highlight: Heads | None) -> pd.DataFrame:
    """Return a DataFrame with the rows of `shown` whose heads are in `highlight`; no rows if it is None.

    `scores` is the whole table, `shown` its rows without NaN. Raises ValueError for a head that `scores` lacks.
    """
    if highlight is None or (isinstance(highlight, pd.DataFrame) and highlight.empty):
        return shown.iloc[:0]
    pairs = pairs_in_table(highlight, scores, "the table")
    index = pd.MultiIndex.from_arrays([scores["layer"], scores["head"]])
    unknown = [pair for pair in pairs if pair not in index]
    if unknown:
        raise ValueError(f"highlight: {head_name(*unknown[0])} has no row in the table: give heads of the table")
    drawn = pd.MultiIndex.from_arrays([shown["layer"], shown["head"]])
    return shown.loc[drawn.isin(pairs)]


def score_points(rows: pd.DataFrame) -> Float[np.ndarray, "points 2"]:
    """Return the points [rows, 2] of the heads in `rows`: s_pos across, s_sym up."""
    return np.asarray(rows[SCORES], dtype=float)


def require_heads(table: pd.DataFrame, columns: Iterable[str], made_by: str) -> None:
    """Raise ValueError if `table` lacks layer, head or one of `columns`, has no rows, or has two rows for a head.

    The message tells the user to give a table of the function `made_by`.
    """
    require(table, ["layer", "head", *columns], made_by)
    require_one_row(table, ["layer", "head"], "give one row per head")


def without_nan(table: pd.DataFrame, columns: list[str]) -> tuple[pd.DataFrame, str | None]:
    """Return (a DataFrame with the rows of `table` without NaN in `columns`, a note as text that counts the other
    rows); the note is None if no row is left out.
    """
    complete = table.dropna(subset=columns)
    count = len(table) - len(complete)
    if not count:
        return complete, None
    rows = "row" if count == 1 else "rows"
    with_nan = [column for column in columns if table[column].isna().any()]
    return complete, f"not drawn: {count} {rows} with NaN in {' or '.join(with_nan)}"
