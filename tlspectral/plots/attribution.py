"""A figure of one attention score as a sum of terms, each divided into its four parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tlspectral.plots.style import BLUE, GREEN, GREY, INK, ORANGE, PALE, dress, legend_below, one_panel, two_decimals
from tlspectral.tables.schema import require

_PARTS = {"symmetric": BLUE, "antisymmetric": ORANGE, "phase": GREEN, "outside_m": PALE}
_MOST_BARS = 16


def qk_attribution(table: pd.DataFrame, *, ax: Axes | None = None) -> Figure:
    """Draw the largest terms of one attention score as bars, each stacked by its four parts.

    >>> import tlspectral as tls, torch
    >>> model = tls.load_model("tiny-rope")
    >>> tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    >>> table = tls.qk_attribution(model, tokens, "L1H0", query=-1, key=2)
    >>> tls.plots.qk_attribution(table).axes[0].get_xlabel()
    'term of the score, before the softmax (logits)'

    Use it to see which earlier writes make a score large. A term is the product of one write to the query and one write
    to the key. Its parts are the symmetric part M_S, the antisymmetric part M_A and the rotary phase Im(M_t) of the
    head's query-key matrix, and what lies outside this matrix, such as biases. Positive parts are stacked to the right
    of 0, negative parts to the left. A dot marks their sum. A ring marks the measured effect of removing the pair, if
    the table has it.

    Args:
        table: result of `tls.qk_attribution`. Needed columns: `query_term, key_term, symmetric, antisymmetric, phase,
            outside_m, total`; used if present: `measured`.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure with at most 16 terms, in logits before the softmax, and the row `rest` last. A note gives the
        number and sum of terms that are not drawn.

    Raises:
        ValueError: a column is missing, or the table has no rows.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: that a term is a cause of the behaviour. Only the rings are measured.
    """
    terms = ["query_term", "key_term"]
    require(table, (*terms, *_PARTS, "total"), "qk_attribution")
    is_rest = table["query_term"] == "rest"
    left_out = table.loc[~is_rest, "total"].iloc[_MOST_BARS:]
    shown = pd.concat([table.loc[~is_rest].iloc[:_MOST_BARS], table.loc[is_rest]], ignore_index=True)
    figure, axes = one_panel(ax, 6.8, 1.6 + 0.3 * len(shown))
    heights = np.arange(len(shown))[::-1]
    right, left = np.zeros(len(shown)), np.zeros(len(shown))
    for part, colour in _PARTS.items():
        values = shown[part].to_numpy(float)
        start = np.where(values >= 0, right, left)
        axes.barh(heights, values, 0.62, left=start, color=colour, gid=part)
        right, left = right + values.clip(min=0), left + values.clip(max=0)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.margins(x=0.04)
    axes.use_sticky_edges = False  # the bars end at 0, and a dot there needs room on both sides
    handles: list[tuple[Artist, str]] = [(Patch(facecolor=colour), part) for part, colour in _PARTS.items()]
    handles.append(_draw_points(axes, shown["total"], heights, "total", INK))
    if "measured" in shown:
        handles.append(_draw_points(axes, shown["measured"], heights, "measured", "none"))
    names = [
        query if query == key == "rest" else f"{query} \N{MULTIPLICATION SIGN} {key}"
        for query, key in zip(*(shown[side] for side in terms), strict=True)
    ]
    axes.set_yticks(heights, names)
    axes.set_xlabel("term of the score, before the softmax (logits)")
    dress(axes)
    axes.set_title(_title(table), fontsize=12, color=INK, loc="left")
    note = f"{len(left_out)} smaller terms are not drawn; they sum to {two_decimals(left_out.sum())}"
    legend_below(figure, handles, ["query term \N{MULTIPLICATION SIGN} key term", note if len(left_out) else None],
        columns=3, ax=ax)  # fmt: skip
    return figure


def _draw_points(axes: Axes, values: Any, heights: np.ndarray, gid: str, face: str) -> tuple[Artist, str]:
    """Draw the points (`values` across, `heights` up) into `axes` as circles with the fill colour `face`, and return
    (artist, legend text); `gid` names the artist and is the legend text.
    """
    (line,) = axes.plot(values, heights, "o", color=INK, markerfacecolor=face, markersize=4 if face == INK else 7,
        linestyle="none", gid=gid, zorder=4)  # fmt: skip
    return line, gid


def _title(table: pd.DataFrame) -> str:
    """Return the title of a `qk_attribution` table, from its `attrs`: head, query and key tokens (or the number of
    prompts), the score in logits and the error of the decomposition.
    """
    attrs = table.attrs
    if "head" not in attrs:
        return "one attention score"
    if "n_prompts" in attrs:
        n, distinct = attrs["n_prompts"], attrs.get("n_distinct", attrs["n_prompts"])
        where = (
            f"mean of {n} scores{'' if distinct == n else f' ({distinct} distinct)'}, {two_decimals(attrs['score'])}"
        )
    else:
        query, key = (f"{attrs[f'{side}_token']!r} ({attrs[side]})" for side in ("query", "key"))
        where = f"{query} to {key}, score {two_decimals(attrs['score'])}"
    error = f", error {two_decimals(attrs['error_score'])}" if "error_score" in attrs else ""
    return f"{attrs['head']}: {where}{error}"
