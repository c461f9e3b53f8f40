"""Figures of an ablation: effects of heads with errors and controls, and kernels before and after."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tlspectral.errors import BadHead, warn_caller
from tlspectral.plots.style import BLUE, GREY, INK, PALE, RED, dress, legend_below, new_figure, one_panel, two_decimals
from tlspectral.selection.heads_as_written import Heads, pairs_in_table
from tlspectral.selection.node_names import head_name
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import require
from tlspectral.tasks.control_tests import draws_floor

_COLUMNS = 2
_OTHERS_RANGE = (0.05, 0.95)


def ablation_effects(
    sweep: pd.DataFrame, heads: Heads | None = None, *, detectors: pd.DataFrame | None = None, ax: Axes | None = None
) -> Figure:
    """Draw how a metric changes when a part of each head is removed, next to the changes of random controls.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> control = {"control": "random", "draws": 19}
    >>> sweep = tls.ablation_sweep(model, "rope_phase", heads="L0", **control)
    >>> figure = tls.plots.ablation_effects(sweep, detectors=tls.detect_heads(model))
    >>> figure.axes[0].get_yticklabels()[-1].get_text()
    'L0H2  (prev 0.22)'

    Use it to see which heads matter more than their control. Each row is a head (or a named set of heads). A red dot is
    the effect of removing the part: the metric without it minus the intact value, with the standard error over
    sequences. A grey tick is the effect of one control: a random part of equal size; for outputs another head of the
    layer; for sets another set. The grey bar spans all controls. At the right stands `control_p`: among the controls
    and the part itself, the share with an effect as large. "≤ 1/20" is the smallest value that 19 controls allow.

    Args:
        sweep: table of `tls.ablation_sweep`; heads without a measured effect are left out.
        heads: heads to draw: "L5H1", (5, 1), "L5" (all of layer 5), "L5KV1" (a key/value group) or a list of these; for
            a sweep over sets or groups their names. Default: all of the sweep.
        detectors: table of `analyze_heads` or `detect_heads`; its `prev` (attention to the previous token) is written
            after each name. Default: none.
        ax: matplotlib Axes to draw into. Default: a new figure.

    Returns:
        matplotlib Figure; across: change in units of the metric (nats for the losses "induction" and "language").

    Raises:
        ValueError: a column is missing, or none of the heads has a measured effect.
        BadHead: `heads` names a head that is not in the sweep.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: an effect, if one of many heads is outside its bar: `control_p` is not corrected for the number of
    heads.
    """
    require(sweep, ("layer", "head", "name", "part", "delta", "delta_se"), "ablation_sweep")
    table, only_scored = sweep.dropna(subset="delta"), False
    if isinstance(heads, pd.DataFrame) and "prev" in heads:
        warn_caller(
            "ablation_effects: give a table with detector scores as detectors=; heads= names the heads to draw; the "
            "earlier call works in this version only",
            DeprecationWarning,
        )
        detectors, heads, only_scored = heads, None, True
    if heads is not None:
        table = table.loc[_named_rows(sweep, heads).loc[table.index]]
    if detectors is None:
        table = table.assign(prev=np.nan)
    else:
        require(detectors, ("layer", "head", "prev"), "detect_heads", name="table of detectors")
        scores = detectors[["layer", "head", "prev"]]
        table = table.drop(columns="prev", errors="ignore").merge(scores, on=["layer", "head"], how="left")
    is_set = table["head"] < 0
    if only_scored:
        table = table.loc[is_set | table["prev"].notna()]
    if table.empty:
        raise ValueError("no head to draw has a measured effect: name others by heads=, or leave it out")
    table = table.sort_values("delta", ignore_index=True, ascending=False)
    figure, axes = one_panel(ax, 6.8, 1.7 + 0.3 * len(table))
    heights = np.arange(len(table))
    axes.axvline(0, color=GREY, linewidth=0.8)
    handles = []
    if "control_draws" in table and (texts := table["control_draws"].map(type).eq(str)).any():
        raise ValueError(
            f"control_draws holds text ({table.loc[texts, 'control_draws'].iloc[0]!r:.40}), because CSV cannot store "
            "lists: write the sweep with write_table as .parquet, or draw it without that column"
        )
    n_draws = max(map(len, table["control_draws"].dropna()), default=0) if "control_draws" in table else 0
    if n_draws:
        # Parts without a size in scores ("output", "long_range", a user's own) have other heads as their control.
        of_heads = table["part"].iloc[0] in ("output", "long_range")
        of_heads |= "score_rms" in table and bool(table["score_rms"].isna().all())
        what = "other heads of the layer" if of_heads else "random parts of equal size"
        if is_set.any():
            of_groups = {"groups"} == {*sweep.attrs.get("control_of_sets", {}).values()} - {"none"}
            what = f"random {'sets of key/value groups' if of_groups else 'sets'} of the same layers"
        least = f"from the least to the largest: no control_p is below 1/{1 + n_draws}"
        handles = [(_draw_control(axes, table), f"{n_draws} {what}, {least}")]
        _write_pvalues(axes, table)
    replaced = f" ({sweep.attrs['replace']})" if "replace" in sweep.attrs else ""
    dots = axes.errorbar(table["delta"], heights, xerr=table["delta_se"], fmt="o", color=RED, zorder=4)
    handles.insert(0, (dots[0], f"{table['part'].iloc[0]} removed{replaced}"))
    named = zip(table["name"], table["prev"], strict=True)
    names = [name if np.isnan(prev) else f"{name}  (prev {prev:.2f})" for name, prev in named]
    axes.set_yticks(heights, names)
    axes.set_ylim(-0.7, len(table) - 0.3)
    task = sweep.attrs.get("task", "induction")
    changed = "the loss (nats)" if task in ("induction", "language") else f"the {task}"
    bars = "; error: of the mean over sequences" if table["delta_se"].notna().any() else ""
    axes.set_xlabel(f"change of {changed}{bars}")
    dress(axes)
    axes.set_title(_title(sweep, task), fontsize=11, color=INK, loc="left")
    legend_below(figure, handles, [], ax=ax)
    return figure


def _named_rows(sweep: pd.DataFrame, heads: Heads) -> pd.Series:
    """Return a boolean Series over the rows of a sweep: True where the head (or the named set of heads) is in `heads`.

    Raises BadHead if the sweep has no row for one of `heads`.
    """
    if (sweep["head"] < 0).all():
        given = heads["name"] if isinstance(heads, pd.DataFrame) and "name" in heads else heads
        names = [given] if isinstance(given, str) else [str(name) for name in cast(Iterable[Any], given)]
        unknown = sorted({*names} - {*sweep["name"]})
        if unknown:
            raise BadHead(f"{unknown[0]!r} is not a set of the sweep: it has {', '.join(map(repr, sweep['name']))}")
        return sweep["name"].isin(names)
    chosen = pd.Series(False, index=sweep.index)
    for layer, head in pairs_in_table(heads, sweep, "the sweep"):
        rows = (sweep["layer"] == layer) & (sweep["head"] == head)
        if not rows.any():
            raise BadHead(f"{head_name(layer, head)} is not in the sweep: name heads that it measured")
        chosen |= rows
    return chosen


def _draw_control(axes: Axes, table: pd.DataFrame) -> Any:
    """Draw into `axes`, for each row of the sweep `table`, a tick per control effect and a bar from the least to the
    largest one.

    Return the artist of the ticks for the legend, or None if no row has controls. Effects come from the column
    control_draws, a list per row.
    """
    ticks: Any = None
    for height, changes in enumerate(table["control_draws"]):
        if changes is None or not len(changes):
            continue
        axes.plot([min(changes), max(changes)], [height, height], color=PALE, linewidth=6, solid_capstyle="butt",
            zorder=1, gid="range of the control")  # fmt: skip
        (ticks,) = axes.plot(changes, [height] * len(changes), "|", color=GREY, markersize=9, zorder=2, gid="control")
    return ticks


def _write_pvalues(axes: Axes, table: pd.DataFrame) -> None:
    """Write the p-value control_p into `axes` at the right edge of each row of the sweep `table`.

    It is written as "≤ 1/n" if it is the smallest value that the row's n - 1 controls allow, and left empty if it is
    NaN.
    """
    across = axes.get_yaxis_transform()  # x from 0 to 1 over the axes
    texts = [
        ""
        if np.isnan(pvalue)
        else f"\N{LESS-THAN OR EQUAL TO} 1/{1 + len(drawn)}"
        if pvalue <= draws_floor(len(drawn)) + 1e-12
        else f"{pvalue:.2f}"
        for pvalue, drawn in zip(table["control_p"], table["control_draws"], strict=True)
    ]
    look: dict[str, Any] = {"va": "center", "fontsize": 9, "color": INK, "gid": "control_p"}
    for height, text in [(len(texts) - 0.3, "control_p"), *enumerate(texts)]:
        axes.text(1.02, height, text, transform=across, **look)


def _title(sweep: pd.DataFrame, task: str) -> str:
    """Return the title of a sweep's figure as text: the model (from `sweep.attrs`), the name `task`, and the metric's
    value without ablation.
    """
    parts = [str(sweep.attrs[name]) for name in ("model",) if name in sweep.attrs] + [task]
    if "intact_value" in sweep.attrs:
        parts.append(f"intact {two_decimals(sweep.attrs['intact_value'])}")
    return ", ".join(parts)


def kernel(
    intact: pd.DataFrame,
    ablated: pd.DataFrame | None = None,
    *,
    others: pd.DataFrame | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the mean attention score of heads against the distance of the key, a panel per head, intact and ablated.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> kernel = tls.relative_position_kernel(model, "L0H3")
    >>> tls.plots.kernel(kernel).axes[0].get_title(loc="left")
    'L0H3'

    Use it to see which distance a head prefers, and whether a part of the head makes this preference:

        intact = tls.relative_position_kernel(model, "L0H3")
        with tls.ablate(model, "L0H3", "rope_phase"):
            ablated = tls.relative_position_kernel(model, "L0H3")
        tls.plots.kernel(intact, ablated)

    Args:
        intact: result of `tls.relative_position_kernel`. Used columns: `layer, head, offset, score`.
        ablated: a second such table for the same heads, made inside a block of `tls.ablate`. Default: None, which draws
            only `intact`.
        others: such a table of all heads of the model, for a grey band: percentiles 5 to 95 of the other heads at each
            distance, every other head shifted to the mean score of the drawn head. Default: None, no band.
        ax: matplotlib Axes to draw into, if there is one head. Default: a new figure.

    Returns:
        matplotlib Figure; across: offset of the key in tokens (-1 is the previous token); up: mean score before the
        softmax, in logits. Predicted scores are not drawn.

    Raises:
        ValueError: `ax` is given and the table has several heads; `others` has no other head with a score at these
            offsets, or comes from another model.
        TypeError: `ax` is not a matplotlib Axes.

    Not established: that distance alone decides. A kernel mixes the effects of content and position. A head outside the
    band differs from most heads of the model; the band is not a null of the head itself.
    """
    needed, made_by = ("layer", "head", "offset", "score"), "relative_position_kernel"
    require(intact, needed, made_by, name="table intact=")
    for name, table in (("ablated", ablated), ("others", others)):
        if table is not None:
            require(table, needed, made_by, name=f"table {name}=")
    groups = list(intact[["layer", "head"]].drop_duplicates().itertuples(index=False, name=None))
    if ax is not None and len(groups) > 1:
        raise ValueError(
            f"ax= takes one panel, and the kernels are of {len(groups)} heads: choose the rows of one head, or leave "
            "ax= out"
        )
    if others is not None:
        require_same_model(others, intact.attrs, "the kernels", name="table of other heads")
    if len(groups) == 1:
        figure, axes = one_panel(ax, 5.6, 4.0)
        panels = [axes]
    else:
        columns = min(_COLUMNS, len(groups))
        rows = -(-len(groups) // columns)
        figure = new_figure(3.6 * columns + 0.4, 3.0 * rows + 0.5)
        panels = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten().tolist()
        for axes in panels[len(groups) :]:
            axes.set_axis_off()
    entries: dict[str, Any] = {}
    for axes, (layer, head) in zip(panels, groups, strict=False):
        table = intact.loc[(intact["layer"] == layer) & (intact["head"] == head)]
        if others is not None:
            n_others, band = _draw_others(axes, table, others)
            entries.setdefault(f"5 to 95 % of {n_others} other heads, moved to the same mean", band)
        (line,) = axes.plot(table["offset"], table["score"], "o-", markersize=3.5, color=BLUE, gid="intact")
        entries.setdefault("intact", line)
        if ablated is not None:
            same = ablated[(ablated["layer"] == layer) & (ablated["head"] == head)]
            (line,) = axes.plot(same["offset"], same["score"], "s--", markersize=3.5, color=RED, gid="ablated")
            entries.setdefault("ablated", line)
        axes.set_title(f"L{layer}H{head}", fontsize=10, color=INK, loc="left")
        axes.set_xlabel("offset of the key (tokens)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        dress(axes)
    for axes in panels[::_COLUMNS]:
        axes.set_ylabel("mean score before the softmax")
    handles = [(artist, text) for text, artist in entries.items()]
    legend_below(figure, handles if len(handles) > 1 else [], [], columns=3, ax=ax)
    return figure


def _draw_others(axes: Axes, drawn: pd.DataFrame, others: pd.DataFrame) -> tuple[int, Any]:
    """Shade the middle 90 % of the kernels of other heads, each moved to the mean score of the drawn head.

    `drawn` are the rows of one head. Returns the number of other heads, and the band for the legend.
    """
    head = (others["layer"] == drawn["layer"].iloc[0]) & (others["head"] == drawn["head"].iloc[0])
    wide = others[~head].pivot_table(index="offset", columns=["layer", "head"], values="score")
    offsets = drawn.loc[drawn["score"].notna(), "offset"]
    wide = wide.reindex(offsets).dropna(axis=1)
    if wide.empty:
        name = head_name(int(drawn["layer"].iloc[0]), int(drawn["head"].iloc[0]))
        raise ValueError(
            f"others= has no other head than {name} with a score at all of its offsets: give "
            "relative_position_kernel(model) of all heads, with the same offsets="
        )
    moved = wide.to_numpy() - wide.to_numpy().mean(0) + drawn["score"].mean()
    low, high = np.quantile(moved, _OTHERS_RANGE, axis=1)
    band = axes.fill_between(offsets, low, high, color=PALE, linewidth=0, zorder=1, gid="other heads")
    return wide.shape[1], band
