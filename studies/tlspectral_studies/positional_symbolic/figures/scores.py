"""Scores of all heads: heat maps, histograms and planes by queried block, scores against columns of the head table.

All refuse a table without rows or a needed column, or with two rows where one is drawn (ValueError).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from tlspectral.plots.head_map import heads
from tlspectral.plots.positional_planes import (
    POSITIONAL,
    POSITIONAL_AXIS,
    SCORES,
    SYMBOLIC,
    circle_entry,
    plane_axes,
    require_heads,
    score_points,
    without_nan,
)
from tlspectral.plots.style import (
    BLUE,
    INK,
    ORANGE,
    colour_bar,
    draw_dots,
    dress,
    legend_below,
    new_figure,
    sequential_colours,
    two_decimals,
)
from tlspectral.tables.schema import require
from tlspectral_studies.positional_symbolic.figures.frequencies import frequency_grid

_AGREEMENT = {
    "rope_imag_frac": "rope_imag_frac (share)",
    "D_head": r"$D_\mathrm{head}$ (share)",
    "prev": "prev (attention mass)",
}
_INDEX = "exclusion index"
_MOST_QUERIES = 9
_STATISTICS = ["score", "column", "spearman", "null_low", "null_high", "null_share"]


def score_heatmaps(scores: pd.DataFrame) -> Figure:
    """Both scores of every head, layers down and heads across, on one scale from 0 to 1.

    Args:
        scores: table of `positional_symbolic`, one row per head: `layer, head, s_pos, s_sym`. Heads
            with NaN are grey and counted; heads without a row are blank.

    Source: PS, "Decoupling Positional and Symbolic Attention Behavior", section 3.3, Figure 1B.

    What it does not establish: that panels which look like negatives of each other confirm Theorem 1. Peaked attention
    makes them so by itself; `positional_symbolic_plane` shows the null of that.
    """
    titles = ("positional score", "symbolic score")
    return _heatmaps(scores, dict(zip(SCORES, titles, strict=True)))


def exclusion_heatmap(scores: pd.DataFrame) -> Figure:
    """The exclusion index of every head, layers down and heads across: 0 symbolic, 1 positional.

    Args:
        scores: table of `positional_symbolic`, one row per head: `layer, head, exclusion_index`. Heads
            with NaN are grey and counted.

    Source: PS, "Decoupling Positional and Symbolic Attention Behavior", Theorem 1.

    What it does not establish: that a head matters. The index is a ratio, also of a head with flat logits;
    `exclusion_plane` shows their spread.
    """
    return _heatmaps(scores, {"exclusion_index": "0 symbolic, 1 positional"})


def _heatmaps(scores: pd.DataFrame, titles: dict[str, str]) -> Figure:
    """One map per column, on a scale from 0 to 1."""
    require_heads(scores, titles, "positional_symbolic")
    figure = new_figure(4.6 * len(titles), 5.2)
    for axes, (score, title) in zip(figure.subplots(1, len(titles), squeeze=False)[0], titles.items(), strict=True):
        heads(scores, score, limits=(0.0, 1.0), ax=axes)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
    return figure


def score_histograms(by_query: pd.DataFrame) -> Figure:
    """Histograms of both scores over heads, one panel per queried block, on the same axes.

    Args:
        by_query: `layer, head, query, s_pos, s_sym`, with `query` the index of the block that the prompt asks about;
            at most 9 different ones. Rows with NaN are left out and counted.

    Source: PS, appendix B.5, Figure 7 below.

    What it does not establish: which heads move. Two equal histograms may hold different heads; `plane_by_query`
    shows them one by one.
    """
    looks = {"s_pos": (BLUE, POSITIONAL), "s_sym": (ORANGE, SYMBOLIC)}
    return _histograms(by_query, looks, "score (cosine)")


def exclusion_histograms(by_query: pd.DataFrame) -> Figure:
    """Histograms of the exclusion index over heads, one panel per queried block, on the same axes.

    Args:
        by_query: `layer, head, query, exclusion_index`, at most 9 different queries. Rows with NaN are left out and
            counted.

    Source: PS, Theorem 1, over the queries of appendix B.5.

    What it does not establish: which heads move: two equal histograms may hold different heads.
    """
    return _histograms(by_query, {"exclusion_index": (BLUE, "0 symbolic, 1 positional")}, _INDEX)


def _histograms(by_query: pd.DataFrame, looks: dict[str, tuple[str, str]], axis: str) -> Figure:
    """One panel per queried block: the first column filled, any other outlined."""
    columns = list(looks)
    queries = queried_blocks(by_query, columns)
    shown, note = without_nan(by_query, columns)
    figure, panels = query_panels(len(queries), size=1.9)
    low = min(0.0, float(shown[columns].min(axis=None))) if len(shown) else 0.0
    bins = np.linspace(low, 1.0, 21)
    entries = []
    for column, (colour, label) in looks.items():
        filled = column == columns[0]
        look: dict[str, Any] = {"fill": True, "alpha": 0.55} if filled else {"linewidth": 1.6}
        for axes, query in zip(panels, queries, strict=True):
            counts = np.histogram(shown.loc[shown["query"] == query, column], bins)[0]
            axes.stairs(counts, bins, color=colour, gid=column, **look)
        patch: dict[str, Any] = (
            {"facecolor": colour, "alpha": 0.55} if filled else {"facecolor": "none", "edgecolor": colour}
        )
        entries.append((Patch(**patch), label))
    for axes, query in zip(panels, queries, strict=True):
        axes.set_title(f"block {query} queried", fontsize=10, color=INK)
        axes.set(xticks=(0, 0.5, 1), xticklabels=("0", ".5", "1"))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        dress(axes)
    label_outer(panels, axis, "heads")
    legend_below(figure, entries, [note], columns=2)
    return figure


def score_agreement(joined: pd.DataFrame, statistics: pd.DataFrame | None = None) -> Figure:
    """The positional score of every head against three columns of the head table.

    Args:
        joined: `layer, s_pos, rope_imag_frac, D_head, prev`, one row per head. Rows with NaN in a panel's columns are
            left out of it and counted.
        statistics: `score, column, spearman, null_low, null_high, null_share`; the rows of score "s_pos" give the
            titles. None, or a column without a row, leaves a panel without a title.

    What it does not establish: that one number causes the other, nor that heads are independent samples. Both may
    depend on the layer, so the dots are coloured by it.
    """
    require(joined, ["layer", "s_pos", *_AGREEMENT], "positional_symbolic joined with one of analyze_heads")
    if statistics is not None:
        require(statistics, _STATISTICS, "score_agreement", name="table of statistics")
    figure = new_figure(7.2, 3.4)
    panels: list[Axes] = figure.subplots(1, len(_AGREEMENT), sharey=True).tolist()
    colours = sequential_colours(joined["layer"])
    left_out: dict[str, int] = {}
    for axes, (column, label) in zip(panels, _AGREEMENT.items(), strict=True):
        shown = joined.dropna(subset=["s_pos", column])
        left_out[column] = len(joined) - len(shown)
        points, of_layer = shown[[column, "s_pos"]].to_numpy(float), colours.to_rgba(shown["layer"].to_numpy(float))
        draw_dots(axes, points, 16, of_layer, column, rim=0.3, zorder=1)
        axes.set_xlabel(label)
        axes.set_title(_statistic(statistics, column), fontsize=9, color=INK)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        dress(axes)
    panels[0].set_ylabel(POSITIONAL_AXIS)
    colour_bar(figure, colours, panels, "layer", whole=True)
    counts = ", ".join(f"{column} {count}" for column, count in left_out.items() if count)
    legend_below(figure, [], [f"rows not drawn, NaN there or in s_pos: {counts}" if counts else None])
    return figure


def _statistic(statistics: pd.DataFrame | None, column: str) -> str:
    """Text about the rank correlation and its null, empty if the statistics have no such row."""
    if statistics is None:
        return ""
    rows = statistics.loc[(statistics["score"] == "s_pos") & (statistics["column"] == column)]
    if rows.empty or pd.isna(rows["spearman"].iloc[0]):
        return ""
    row = rows.iloc[0]
    text = f"Spearman {two_decimals(row['spearman'])}"
    if pd.isna(row["null_low"]):
        return text
    return (
        f"{text}\nnull {two_decimals(row['null_low'])} to {two_decimals(row['null_high'])}\n"
        f"at its percentile {100 * row['null_share']:.3g}"
    )


def plane_by_query(by_query: pd.DataFrame) -> Figure:
    """Draw the plane once per queried block, on the same axes, which shows how heads move.

    Args:
        by_query: `layer, head, query, s_pos, s_sym`, with `query` the index of the block that the prompt asks about;
            at most 9 different ones. Rows with NaN are left out and counted.

    Source: PS, appendix B.5, Figure 7 above.

    What it does not establish: that a head finds the queried block. The scores say how its attention responds to
    swaps, not whether it attends to the right block.
    """
    queries = queried_blocks(by_query)
    shown, note = without_nan(by_query, SCORES)
    figure, panels = query_panels(len(queries), size=2.05)
    colours = sequential_colours(by_query["layer"])
    for axes, query in zip(panels, queries, strict=True):
        rows = shown.loc[shown["query"] == query]
        draw_dots(axes, score_points(rows), 12.0, colours.to_rgba(rows["layer"].to_numpy(float)), "heads")
        plane_axes(axes, score_points(shown), labels=False)
        axes.set_title(f"block {query} queried", fontsize=10, color=INK)
    label_outer(panels, f"{POSITIONAL} (cosine)", f"{SYMBOLIC} (cosine)")
    colour_bar(figure, colours, panels, "layer", whole=True)
    legend_below(figure, [circle_entry()], [note])
    return figure


def queried_blocks(by_query: pd.DataFrame, columns: list[str] = SCORES) -> list[int]:
    """The queried blocks of a table, in order. Raises ValueError as `plane_by_query`."""
    require(by_query, ["layer", "head", "query", *columns], "scores by queried block")
    queries = sorted(int(query) for query in by_query["query"].unique())
    if len(queries) > _MOST_QUERIES:
        raise ValueError(f"{len(queries)} queried blocks: give a table with at most {_MOST_QUERIES} of them")
    return queries


def query_panels(count: int, *, size: float) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per queried block, at most three in a row, all on the same axes."""
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = new_figure(size * columns + 0.9, size * rows + 0.9)
    grid = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).ravel().tolist()
    for axes in grid[count:]:
        axes.remove()
    return figure, grid[:count]


def label_outer(panels: list[Axes], across: str, up: str) -> None:
    """Write axis names, and tick labels, under the lowest panel of each column and left of each row."""
    for axes in panels[-3:]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel(across, color=INK, fontsize=10)
    for axes in panels[::3]:
        axes.set_ylabel(up, color=INK, fontsize=10)


def task_figures(tables: Mapping[str, pd.DataFrame], heads: pd.DataFrame | None = None) -> dict[str, Figure]:
    """Return the paper's figures of one task, by name.

    Args:
        tables: of `positional_symbolic` on a task `heads` and, with `by="query"`, `queries`; where there, `frequencies`
            (with `per_frequency=True`), and `agreement`, the table of `score_agreement`.
        heads: table of `analyze_heads` of the same model, against whose columns the scores are drawn; None: they are
            not.

    Raises:
        ValueError: as the single figures.
    """
    figures = {
        "heatmaps": score_heatmaps(tables["heads"]),
        "plane_by_query": plane_by_query(tables["queries"]),
        "histograms": score_histograms(tables["queries"]),
        "exclusion_heatmap": exclusion_heatmap(tables["heads"]),
        "exclusion_histograms": exclusion_histograms(tables["queries"]),
    }
    if "frequencies" in tables:
        figures["frequencies"] = frequency_grid(tables["frequencies"])
    if heads is not None:
        columns = ["layer", "head", "rope_imag_frac", "D_head", "prev"]
        joined = tables["heads"].merge(heads[columns], on=["layer", "head"])
        figures["agreement"] = score_agreement(joined, statistics=tables.get("agreement"))
    return figures
