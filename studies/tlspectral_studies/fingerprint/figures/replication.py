"""Figures of "Fingerprint, Not Blueprint" (FP) from tables: the published ones, or a user's own."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from tlspectral.plots.content_direction import plane
from tlspectral.plots.style import BLUE, GREY, INK, ORANGE, PALE, dress, legend_below, new_figure
from tlspectral.stats import attenuation
from tlspectral.stats.correlations import RankMethod
from tlspectral_studies.fingerprint.constrained import formation, rerouting
from tlspectral_studies.fingerprint.constrained.presets import loss_threshold
from tlspectral_studies.fingerprint.figures.checkpoints import checkpoint_acts
from tlspectral_studies.fingerprint.figures.formation import formation as formation_figure
from tlspectral_studies.fingerprint.figures.formation import places_around
from tlspectral_studies.fingerprint.replication.claims import PublishedTables
from tlspectral_studies.fingerprint.replication.constrained_training import VOCABULARY
from tlspectral_studies.fingerprint.replication.positional_schemes import (
    NOT_ROPE,
    ROPE,
    SchemeContrast,
    scheme_contrast,
)

_LOOKS = {ROPE: (BLUE, "o"), NOT_ROPE: (ORANGE, "s")}
_SHOWN = ("model", "scheme", "percentile")
_LINES = ((BLUE, "-"), (ORANGE, "--"), (INK, ":"), (GREY, "-."))


def published_figures() -> dict[str, Figure]:
    """All figures of FP that the published tables hold, by a name for a file.

    Returns:
        `figure_1` (GPT-2 in the plane of content and direction), `figure_2a`, `figure_2b`, `figure_3`, `figure_4` (a to
        c) and `figure_5` (a to d).

    What it does not establish: anything beyond the tables. The function that draws a figure says what it shows.
    """
    tables = PublishedTables()
    first = next(iter(tables.checkpoints.values()))
    constrained = tables.constrained
    rotary = {name: heads for name, heads in tables.heads.items() if "rope_imag_frac" in heads}
    return {
        "figure_1": plane(tables.heads["gpt2"]),
        "figure_2a": scheme_percentiles(scheme_contrast(tables.heads)),
        "figure_2b": attenuation_bars(rotary),
        "figure_3": position_kernels(tables.kernels),
        # At step 0 weights are random: the median there is that of the null.
        "figure_4": checkpoint_acts(tables.checkpoints, null=float(first["D_head_median"].iloc[0])),
        "figure_5": formation_figure(
            constrained.evaluations,
            formation(constrained.evaluations, vocabulary=VOCABULARY),
            rerouting(constrained.heads, constrained.kernels),
            constrained.kernels,
            loss_threshold=loss_threshold(VOCABULARY),
        ),
    }


def scheme_percentiles(contrast: SchemeContrast) -> Figure:
    """Draw the within-model percentile of D_head of each model's strongest previous-token heads (FP, Fig. 2a).

    A point is a head, a bar the median of its model; the p-value is the exact permutation of models.

    Args:
        contrast: of `scheme_contrast`.

    Returns:
        A figure that belongs to no window.

    What it does not establish: that positions make the difference, see `scheme_contrast`.
    """
    models = contrast.models.sort_values("scheme", ascending=True, kind="stable", key=lambda names: names == ROPE)
    figure = new_figure(max(3.6, min(0.9 * len(models) + 1.6, 8.4)), 3.9)
    axes = figure.subplots()
    for bound in (0.25, 0.8):
        axes.axhline(bound, color=PALE, linewidth=1, zorder=0)
    for index, (model, scheme, median) in enumerate(zip(*(models[name] for name in _SHOWN), strict=True)):
        colour, marker = _LOOKS[scheme]
        of_model = contrast.heads.loc[contrast.heads["model"] == model, "percentile"].to_numpy(dtype=float)
        across = places_around(index, len(of_model), 0.18)
        axes.plot(across, of_model, marker, color=colour, markersize=5, gid=f"heads of {model}")
        axes.plot([index - 0.3, index + 0.3], [median] * 2, color=INK, linewidth=2, gid=f"median of {model}")
    axes.set_xticks(range(len(models)), models["model"], rotation=25, ha="right")
    axes.set_ylim(0, 1.03)
    axes.set_ylabel("percentile of D_head")
    axes.set_title(f"top {int(models['k'].iloc[0])} previous-token heads", color=INK, fontsize=10, loc="left")
    dress(axes)
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=colour, marker=marker, linestyle="none"), scheme)
        for scheme, (colour, marker) in _LOOKS.items()
        if (models["scheme"] == scheme).any()
    ]
    entries.append((Line2D([], [], color=INK, linewidth=2), "median"))
    legend_below(figure, entries, [_tested(contrast)], columns=3)
    return figure


def attenuation_bars(heads: Mapping[str, pd.DataFrame]) -> Figure:
    """Draw the share of D_head's association that phase controls remove, by both estimators (FP, Fig. 2b and Table 3).

    Args:
        heads: tables of rotary models by name: `D_head, prev, dir_frac, rope_imag_frac, freq_centroid, layer`.

    Returns:
        A figure that belongs to no window.

    Raises:
        ValueError: what `attenuation` refuses.

    What it does not establish: mediation, or a dose: FP has two rotary fractions, and the estimators differ by as much.
    """
    figure = new_figure(max(3.4, 1.2 * len(heads) + 1.4), 3.6)
    axes = figure.subplots()
    width, positions = 0.36, np.arange(len(heads))
    bars_of: tuple[tuple[float, RankMethod, str, str | None], ...] = (
        (-width / 2, "hybrid", BLUE, None),
        (width / 2, "rank", ORANGE, "//"),
    )
    for offset, method, colour, hatch in bars_of:
        shares = [100 * attenuation(table, method=method).statistic for table in heads.values()]
        bars = axes.bar(positions + offset, shares, width, color=colour, hatch=hatch, edgecolor="white", label=method)
        axes.bar_label(bars, fmt="%.0f", padding=2, color=INK, fontsize=9)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set_xticks(positions, list(heads))
    axes.set_ylabel("attenuation by phase controls, %")
    axes.margins(y=0.12)
    dress(axes)
    entries: list[tuple[Artist, str]] = [
        (Patch(facecolor=BLUE, edgecolor="white"), "hybrid"),
        (Patch(facecolor=ORANGE, edgecolor="white", hatch="//"), "rank"),
    ]
    legend_below(figure, entries, [], columns=2)
    return figure


def position_kernels(curves: pd.DataFrame) -> Figure:
    """Draw mean scores by relative position: intact heads left, ablated beside intact ones right (FP, Fig. 3).

    Args:
        curves: `layer, head, offset, score, ablated`, up to four heads, as of `published_kernels`.

    Returns:
        A figure that belongs to no window; the right panel is there if a head is ablated.

    Raises:
        ValueError: no rows, or more than four heads.

    What it does not establish: that a head attends by its kernel: contents vary around a mean over positions.
    """
    intact, ablated = curves.loc[~curves["ablated"]], curves.loc[curves["ablated"]]
    heads = list(intact[["layer", "head"]].drop_duplicates().itertuples(index=False, name=None))
    if not 1 <= len(heads) <= len(_LINES):
        raise ValueError(f"the figure holds one to {len(_LINES)} heads, found {len(heads)}")
    panels = 1 + bool(len(ablated))
    figure = new_figure(3.9 * panels, 3.4)
    drawn = np.atleast_1d(figure.subplots(1, panels))
    for (layer, head), (colour, dashes) in zip(heads, _LINES, strict=False):
        _curve(drawn[0], _of(intact, layer, head), f"{layer}.{head}", colour, dashes)
    drawn[0].set_title("intact", color=INK, fontsize=10, loc="left")
    for layer, head in ablated[["layer", "head"]].drop_duplicates().itertuples(index=False, name=None):
        _curve(drawn[1], _of(intact, layer, head), f"{layer}.{head} intact", BLUE, "-")
        _curve(drawn[1], _of(ablated, layer, head), f"{layer}.{head} without phase", ORANGE, "--")
        drawn[1].set_title(f"{layer}.{head}, rope phase removed", color=INK, fontsize=10, loc="left")
    for axes in drawn:
        axes.axvline(-1, color=PALE, linewidth=1, zorder=0)
        axes.set_xlabel("offset of the key (tokens)")
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)
        dress(axes)
    drawn[0].set_ylabel("mean score before the softmax")
    return figure


def _curve(axes: Axes, curve: pd.DataFrame, label: str, colour: str, dashes: str) -> None:
    ordered = curve.sort_values("offset")
    axes.plot(ordered["offset"], ordered["score"], color=colour, linestyle=dashes, label=label)


def _of(curves: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    return curves.loc[(curves["layer"] == layer) & (curves["head"] == head)]


def _tested(contrast: SchemeContrast) -> str | None:
    """One line on the test."""
    test = contrast.test
    if test is None:
        return None
    apart = "perfectly separated" if test.separated else "not separated"
    return f"{test.n} models, {apart}; exact permutation p = {test.pvalue:.3f} (smallest possible {test.floor:.3f})"
