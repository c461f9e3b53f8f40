"""Figures of training histories: a head and the heads around it over the steps of one or several trainings.

Tables are those of `HeadHistory.track()` in `tlspectral.history`, or published ones with the same columns.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, PALE, dress, legend_below, new_figure
from tlspectral.tables.schema import require
from tlspectral_studies.fingerprint.history_questions import formation_crossing

# Colour, dashes and marker of each model: models differ without colour too.
_LOOKS: tuple[dict[str, Any], ...] = tuple(
    {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 3.5, "linewidth": 1.3}
    for colour, dashes, marker in ((BLUE, "-", "o"), (ORANGE, "--", "s"), (INK, ":", "^"), (GREY, "-.", "D"))
)
_WORDS = {
    "prev": "attention to the previous token",
    "rope_imag_frac_pct": "phase percentile within the model",
    "D_head_median": r"median $D_{head}$ of all heads",
}
_NULL = "D_head_null_median"
_LOGARITHMIC = 100.0  # last step over the first above 0, from which the axis of steps is logarithmic


def checkpoint_acts(tracks: pd.DataFrame | Mapping[str, pd.DataFrame], *, null: float | None = None) -> Figure:
    """Draw a training in three panels: a head's behaviour, its phase percentile, and the median head against its null.

    Args:
        tracks: one row per step with rising `step`, of one head: `HeadHistory.track()`; or several by name.
        null: the median's null, one number for all steps; None draws the column `D_head_null_median`, and shades the
            range of `D_head_null_low` and `D_head_null_high` where the table has them.

    Shaded are the steps from those between which the first of all crosses 0.5 of `prev` to those between which the last
    does. Steps that span two decades are on a logarithmic axis that includes 0.

    Raises:
        ValueError: a column is missing or NaN, steps do not rise, no table, or more than four.

    Source: "Fingerprint, Not Blueprint" (FP, Fig. 4), whose formation window is 1 to 4 thousand million tokens.

    What it does not establish: an order inside the shaded window, which is as fine as the saved steps are; nor that the
    head drawn is special: it was chosen by its last step.
    """
    named = {"": tracks} if isinstance(tracks, pd.DataFrame) else dict(tracks)
    if not 1 <= len(named) <= len(_LOOKS):
        raise ValueError(f"the figure holds one to {len(_LOOKS)} models, found {len(named)}")
    crossings = [formation_crossing(track).behaviour for track in named.values()]
    for name, track in named.items():
        _require_numbers(track, ["D_head_median", *([_NULL] if null is None else [])], name)
    bounds = [(crossing.after or 0, crossing.step) for crossing in crossings if crossing.step is not None]
    figure = new_figure(10.2, 3.5)
    panels = figure.subplots(1, 3)
    banded = False
    for (name, track), look in zip(named.items(), _LOOKS, strict=False):
        steps = track["step"].to_numpy(dtype=float)
        for axes, column in zip(panels, _WORDS, strict=True):
            axes.plot(steps, track[column].to_numpy(dtype=float), label=name or column, **look)
        if null is None:
            panels[2].plot(steps, track[_NULL].to_numpy(dtype=float), color=look["color"], linewidth=0.8, gid="null")
            banded |= _shade_null(panels[2], track, look["color"])
    if null is not None:
        panels[2].axhline(null, color=GREY, linewidth=0.8, gid="null")
    panels[1].axhline(0.5, color=GREY, linewidth=0.8, linestyle=":", gid="middle")
    steps = np.concatenate([track["step"].to_numpy(dtype=float) for track in named.values()])
    for axes, letter, words in zip(panels, "abc", _WORDS.values(), strict=True):
        if bounds:
            window = min(low for low, _ in bounds), max(high for _, high in bounds)
            axes.axvspan(*window, color=PALE, linewidth=0, zorder=0, gid="window")
        _lay_out_steps(axes, steps)
        axes.set_title(f"({letter}) {words}", color=INK, fontsize=10, loc="left")
        dress(axes)
    for axes in panels[:2]:
        axes.set_ylim(-0.03, 1.03)
    _legend(figure, list(named), window=bool(bounds), banded=banded)
    return figure


def _lay_out_steps(axes: Axes, steps: Float64[np.ndarray, " steps"]) -> None:
    """Make the axis of steps linear, or logarithmic with 0 for steps that span two decades."""
    low, high, positive = steps.min(), steps.max(), steps[steps > 0]
    axes.set_xlabel("training step")
    if len(positive) and high >= _LOGARITHMIC * positive.min():
        axes.set_xscale("symlog", base=10, linthresh=max(1.0, positive.min()), linscale=0.4)
        axes.set_xlim(-0.2 * positive.min() if low == 0 else low / 1.2, high * 1.2)


def _shade_null(axes: Axes, track: pd.DataFrame, colour: str) -> bool:
    """Shade the range of the null, if the table has it; returns whether it has."""
    low, high = (f"D_head_null_{end}" for end in ("low", "high"))
    if low not in track or high not in track:
        return False
    axes.fill_between(
        track["step"].to_numpy(dtype=float),
        track[low].to_numpy(dtype=float),
        track[high].to_numpy(dtype=float),
        color=colour,
        alpha=0.15,
        linewidth=0,
        gid="null range",
    )
    return True


def _legend(figure: Figure, names: list[str], *, window: bool, banded: bool) -> None:
    entries: list[tuple[Artist, str]] = []
    if len(names) > 1:
        entries += [(Line2D([], [], **look), name) for name, look in zip(names, _LOOKS, strict=False)]
    if window:
        entries.append((Patch(color=PALE), "formation window"))
    entries.append((Line2D([], [], color=GREY, linewidth=0.8, linestyle=":"), "middle of the heads"))
    entries.append((Line2D([], [], color=GREY, linewidth=0.8), "null of the median"))
    if banded:
        entries.append((Patch(color=GREY, alpha=0.15), "95 % of medians under the null"))
    legend_below(figure, entries, [], columns=min(len(entries), 6))


def _require_numbers(track: pd.DataFrame, columns: list[str], name: str) -> None:
    called = f"table of {name}" if name else "table"
    require(track, columns, "HeadHistory.track()", name=called)
    for column in columns:
        if track[column].isna().any():
            raise ValueError(f"the {called} has NaN in column {column!r}")
