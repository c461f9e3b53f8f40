"""Figure of constrained training: steps of formation, spectra of the previous-token heads, and their kernels."""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tlspectral.plots.style import GREY, INK, PALE, dress, legend_below, new_figure
from tlspectral.tables.schema import require

# Okabe and Ito's colours. Markers and dashes tell arms apart without colour.
_ARMS = {
    "ape_free": ("#0072b2", "o", "-"),
    "ape_sym": ("#56b4e9", "s", "--"),
    "rope_free": ("#d55e00", "o", "-"),
    "rope_sym": ("#e69f00", "s", "--"),
    "rope_imag": ("#a0508a", "^", ":"),
}
_RUN_AND_HEAD = ["arm", "seed", "step", "layer", "head"]
_OTHERS = (INK, "D", "-.")
_NO_PHASE = -0.06  # ordinate of heads without rotary positions


def formation(
    evaluations: pd.DataFrame,
    formation: pd.DataFrame,
    rerouting: pd.DataFrame,
    kernels: pd.DataFrame,
    *,
    loss_threshold: float | None = None,
) -> Figure:
    """Draw Fig. 5 of "Fingerprint, Not Blueprint" (FP, section 10) from a grid or the published tables.

    (a) loss on predictable targets over the steps, a thin line per seed, a thick one their mean while all go on; (b)
    the step of formation, filled by both criteria, hollow by the loss alone, an arrow where a run had not formed; (c)
    `dir_frac` and `rope_imag_frac` of the previous-token head at the end; (d) its position kernel less its mean.

    Args:
        evaluations: `arm, seed, step, ce_pred`.
        formation: of `tlspectral_studies.fingerprint.constrained.formation`.
        rerouting: of `tlspectral_studies.fingerprint.constrained.rerouting`. Columns of the folded operator are drawn
            where they are there, else those of the raw weights; the axes say which.
        kernels: `arm, seed, step, layer, head, offset, score`.
        loss_threshold: the level of formation, drawn in (a); None takes it from the preset in `evaluations.attrs`, and
            draws none where there is none.

    Arms have one colour, marker and dash throughout.

    What it does not establish: what the constraints cost a larger model. See `formation_tests` for the contrasts.
    """
    for name, table, needed in (
        ("evaluations", evaluations, ("arm", "seed", "step", "ce_pred")),
        ("formation", formation, ("arm", "seed", "last_step", "formed_loss", "formed_both")),
        ("rerouting", rerouting, _RUN_AND_HEAD),
        ("kernels", kernels, (*_RUN_AND_HEAD, "offset", "score")),
    ):
        require(table, needed, "a constrained grid", name=f"table of {name}")
    if loss_threshold is None:
        loss_threshold = evaluations.attrs.get("preset", {}).get("loss_threshold")
    arms = [str(arm) for arm in pd.unique(evaluations["arm"])]
    figure = new_figure(8.4, 6.8)
    curves, times, plane, shapes = figure.subplots(2, 2).flat
    _draw_curves(curves, evaluations, arms, loss_threshold)
    _draw_times(times, formation, arms)
    _draw_plane(plane, rerouting, arms)
    _draw_kernels(shapes, rerouting, kernels, arms)
    for letter, axes in zip("abcd", (curves, times, plane, shapes), strict=True):
        axes.set_title(f"({letter})", loc="left", color=INK, fontsize=10)
        dress(axes)
    entries: list[Any] = []
    for arm in arms:
        colour, marker, dashes = _look(arm)
        entries.append((curves.plot([], [], color=colour, marker=marker, linestyle=dashes, markersize=5)[0], arm))
    legend_below(figure, entries, [], columns=len(arms))
    return figure


def _draw_curves(axes: Axes, evaluations: pd.DataFrame, arms: list[str], threshold: float | None) -> None:
    if threshold is not None:
        axes.axhline(threshold, color=GREY, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.annotate(
            "threshold", (1, threshold), xycoords=("axes fraction", "data"), ha="right", va="bottom", color=GREY, size=8
        )
    for arm in arms:
        colour, _, dashes = _look(arm)
        wide = evaluations.loc[evaluations["arm"] == arm].pivot_table(index="step", columns="seed", values="ce_pred")
        losses = wide.to_numpy()  # [steps, seeds]
        steps = wide.index.to_numpy()
        axes.plot(steps, losses, color=colour, linewidth=0.5, alpha=0.5)
        axes.plot(steps, losses.mean(1), color=colour, linewidth=1.8, linestyle=dashes)  # NaN where a run has ended
    axes.set_xlabel("step")
    axes.set_ylabel("loss on predictable targets (nats)")
    axes.set_ylim(bottom=0)


def _draw_times(axes: Axes, formation: pd.DataFrame, arms: list[str]) -> None:
    for index, arm in enumerate(arms):
        colour, marker, _ = _look(arm)
        runs = formation.loc[formation["arm"] == arm].sort_values("seed")
        across = places_around(index, len(runs), 0.2)
        last = runs["last_step"].to_numpy(dtype=float)
        both, loss = (runs[name].to_numpy(dtype=float) for name in ("formed_both", "formed_loss"))
        axes.plot(across, loss, marker, color=colour, markerfacecolor="white", markersize=6, linestyle="")
        axes.plot(across, both, marker, color=colour, markersize=6, linestyle="")
        never = np.isnan(both)
        axes.plot(across[never], last[never], marker=r"$\uparrow$", color=colour, markersize=10, linestyle="")
        if not never.any():
            axes.hlines(both.mean(), index - 0.3, index + 0.3, color=INK, linewidth=1.2)
    axes.set_xticks(range(len(arms)), [arm.replace("_", "\n", 1) for arm in arms])
    axes.set_xlim(-0.6, len(arms) - 0.4)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("step of formation")


def _draw_plane(axes: Axes, rerouting: pd.DataFrame, arms: list[str]) -> None:
    folded = {"dir_frac", "rope_imag_frac"} <= set(rerouting.columns)
    ending, note = ("", "") if folded else ("_raw", ", raw weights")
    axes.axhspan(2 * _NO_PHASE, _NO_PHASE / 2, color=PALE, alpha=0.5, linewidth=0)
    axes.annotate("no rotary positions", (0.35, _NO_PHASE), ha="center", va="center", color=GREY, size=8)
    for arm in arms:
        colour, marker, _ = _look(arm)
        heads = rerouting.loc[rerouting["arm"] == arm]
        phase = heads[f"rope_imag_frac{ending}"].to_numpy(dtype=float)
        axes.plot(
            heads[f"dir_frac{ending}"].to_numpy(dtype=float),
            np.where(np.isnan(phase), _NO_PHASE, phase),
            marker,
            color=colour,
            markersize=6,
            linestyle="",
            alpha=0.8,
        )
    axes.set_xlim(-0.03, 0.8)
    axes.set_ylim(2 * _NO_PHASE, 0.7)
    axes.set_xlabel(f"dir_frac of the previous-token head{note}")
    axes.set_ylabel(f"rope_imag_frac{note}")


def _draw_kernels(axes: Axes, rerouting: pd.DataFrame, kernels: pd.DataFrame, arms: list[str]) -> None:
    chosen = kernels.merge(rerouting[_RUN_AND_HEAD], on=_RUN_AND_HEAD)
    for arm in arms:
        colour, _, dashes = _look(arm)
        wide = chosen.loc[chosen["arm"] == arm].pivot_table(index="offset", columns="seed", values="score")
        centred = wide.to_numpy() - wide.to_numpy().mean(0)  # [offsets, seeds]
        offsets = wide.index.to_numpy()
        axes.plot(offsets, centred, color=colour, linewidth=0.5, alpha=0.5)
        axes.plot(offsets, centred.mean(1), color=colour, linewidth=1.8, linestyle=dashes)
    axes.axvline(-1, color=GREY, linewidth=1.0, linestyle=(0, (1, 2)))
    axes.set_xlabel("offset, key \N{MINUS SIGN} query")
    axes.set_ylabel("score less its mean over offsets")


def _look(arm: str) -> tuple[str, str, str]:
    return _ARMS.get(arm, _OTHERS)


def places_around(place: int, count: int, reach: float) -> Float64[np.ndarray, " points"]:
    """`count` coordinates spread around one, so that no point hides another; a single one lies at the centre."""
    return place + (np.linspace(-reach, reach, count) if count > 1 else np.zeros(count))
