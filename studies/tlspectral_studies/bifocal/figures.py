"""Figures of training with learnable rotary positions: parameters, losses, accuracy by depth, outputs by depth.

Tables are those of `tlspectral_studies.bifocal`. Where a table holds several arms, each has the same colour in every
figure.
"""

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.typing import LineStyleType

from tlspectral.plots.style import (
    GREY,
    INK,
    PALE,
    colour_bar,
    dress,
    legend_below,
    new_figure,
    sequential_colours,
)
from tlspectral.tables.schema import require

_SPECTRAL = "an arm that has spectral parameters"
_LANGUAGES = "the experiment languages"
_ARM_COLOURS = {
    "standard": INK,
    "omega": "#c8102e",
    "full": "#1b6ca8",
    "bifocal": "#2e8b57",
    "placebo": "#e08a00",
    "full_noise": "#7b4fa3",
    "full_noise_shared": "#8c6d46",
    "fixed": INK,
    "linear": "#8c6d46",
    "dynamic": "#2e8b57",
    "yarn": "#e08a00",
    "learned": "#c8102e",
    "learned_fast": "#7b4fa3",
}
_SCORED_COLOURS = {"answers": INK, "tokens": "#1b6ca8", "padded": "#e08a00"}
_PHASE_LINES: dict[str, tuple[LineStyleType, str]] = {
    "mean_abs": ("-", "mean |phase|"),
    "start_abs": (":", "mean |phase| at the start"),
    "drift": ("--", "mean distance from the start"),
}


def evolution(trajectory: pd.DataFrame) -> Figure:
    """Draw the frequencies of every head and pair over training: as they are, and as a multiple of their start.

    Args:
        trajectory: columns `step, layer, head, frequency, omega` of one run.

    A column of two panels per layer. Colour is the starting frequency.

    What it does not establish: that a frequency which moved was of use; see `resonance_evolution` for a control.
    """
    require(trajectory, ("step", "layer", "head", "frequency", "omega"), _SPECTRAL, name="trajectory")
    layers = sorted(trajectory["layer"].unique())
    figure = new_figure(3.6 * len(layers) + 1.2, 5.6)
    panels = figure.subplots(2, len(layers), sharex=True, sharey="row", squeeze=False)
    starts = _where(trajectory, "step", trajectory["step"].min())["omega"].abs()
    colours = ScalarMappable(LogNorm(float(starts.min()), float(starts.max())), sequential_colours(starts).cmap)
    for column, layer in enumerate(layers):
        above, below = panels[:, column]
        wide = _where(trajectory, "layer", layer).pivot_table(
            index="step", columns=["head", "frequency"], values="omega"
        )
        for omega in wide.to_numpy().T:
            colour = colours.to_rgba(abs(omega[0]))
            above.plot(wide.index.to_numpy(), np.abs(omega), color=colour, linewidth=0.8)
            below.plot(wide.index.to_numpy(), omega / omega[0], color=colour, linewidth=0.8)
        above.set_yscale("log")
        above.set_title(f"layer {layer}", color=INK)
        below.set_xlabel("step")
        dress(above)
        dress(below)
    panels[0, 0].set_ylabel(r"$|\Omega|$ (radians per token)")
    panels[1, 0].set_ylabel(r"$\Omega$ / start")
    bar = figure.colorbar(colours, ax=list(panels.flat), fraction=0.03, pad=0.02, aspect=40)
    bar.set_label("start (radians per token)", color=INK)
    bar.outline.set_visible(False)
    return figure


def resonance_evolution(table: pd.DataFrame) -> Figure:
    """Draw the largest cos(Omega N) over training, mean over layers, heads and runs; one panel per set of pairs.

    Args:
        table: `step, pairs, resonance`, as of `resonance_over_training`; with `arm` one line per arm.

    What it does not establish: learning, where a line of random moves of that size would rise as well
    (`resonance_gain`).
    """
    require(table, ("step", "pairs", "resonance"), _SPECTRAL)
    sets = list(table["pairs"].unique())
    figure, panels = _two_in_a_row(len(sets))
    for axes, pairs in zip(panels, sets, strict=True):
        for arm, part in _by_arm(_where(table, "pairs", pairs)):
            steps, mean = _mean_per_step(part, "resonance")
            axes.plot(steps, mean, color=_ARM_COLOURS.get(arm, INK), label=arm)
        axes.set_title(f"{pairs} pairs", fontsize=10, color=INK, loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel(r"largest $\cos(\Omega N)$, mean over $N$")
        axes.ticklabel_format(axis="y", useOffset=False)
        dress(axes)
    _shared_legend(figure)
    return figure


def phase_evolution(table: pd.DataFrame) -> Figure:
    """Draw mean |phase| over training, its start, and the distance from that start.

    Args:
        table: `step, mean_abs, start_abs, drift`, as of `phase_drift`; with `arm` one colour per arm.

    Solid the mean |phase|, dotted its start, dashed the distance from the start. Means over layers, heads and runs.

    What it does not establish: learning. A phase without any effect drifts under Adam too.
    """
    require(table, ("step", *_PHASE_LINES), _SPECTRAL)
    figure = new_figure(6.4, 3.6)
    axes = figure.subplots()
    arms = _by_arm(table)
    for arm, part in arms:
        colour = _ARM_COLOURS.get(arm, INK)
        for column, (dashes, label) in _PHASE_LINES.items():
            axes.plot(*_mean_per_step(part, column), color=colour, linestyle=dashes, label=f"{arm} {label}".strip())
    axes.set_xlabel("step")
    axes.set_ylabel("radians")
    axes.set_yscale("symlog", linthresh=1e-4)
    dress(axes)
    entries = [Line2D([], [], color=_ARM_COLOURS.get(arm, INK), label=arm) for arm, _ in arms if arm]
    entries += [Line2D([], [], color=GREY, linestyle=dashes, label=label) for dashes, label in _PHASE_LINES.values()]
    figure.legend(handles=entries, loc="outside right center", frameon=False, fontsize=7, labelcolor=INK)
    return figure


def depth_manifold_plane(table: pd.DataFrame) -> Figure:
    """Draw each head's outputs in the plane of two principal components, coloured by nesting depth (BA, Fig. 3).

    Args:
        table: of `depth_manifold`: `layer, head, depth, pc1, pc2, between`; with `arm` a row of panels per arm.

    Dots are single words, the line joins the means of neighbouring depths.

    What it does not establish: that shape in two components is used by the model, nor that depth causes it: in nested
    words depth is position.
    """
    require(table, ("layer", "head", "depth", "pc1", "pc2", "between"), "depth_manifold")
    arms = list(_by_arm(table))
    heads = list(table[["layer", "head"]].drop_duplicates().itertuples(index=False, name=None))
    figure = new_figure(1.9 * len(heads) + 1.0, 2.1 * len(arms) + 0.4)
    panels = figure.subplots(len(arms), len(heads), squeeze=False)
    colours = sequential_colours(table.loc[:, "depth"])
    for row, (arm, part) in zip(panels, arms, strict=True):
        for axes, (layer, head) in zip(row, heads, strict=True):
            of_head = _where(_where(part, "layer", layer), "head", head)
            axes.scatter(
                of_head["pc1"],
                of_head["pc2"],
                s=3,
                color=colours.to_rgba(of_head["depth"].to_numpy(dtype=float)),
                linewidths=0,
            )
            path = of_head.pivot_table(index="depth", values=["pc1", "pc2"])
            axes.plot(path["pc1"].to_numpy(), path["pc2"].to_numpy(), color=INK, linewidth=0.8)
            axes.set_title(f"L{layer}H{head}  between {of_head['between'].iloc[0]:.2f}", color=INK, fontsize=8)
            axes.set_xticks([])
            axes.set_yticks([])
            dress(axes)
        row[0].set_ylabel(arm, color=INK)
    colour_bar(figure, colours, list(panels.flat), "depth", whole=True)
    return figure


def training_losses(losses: pd.DataFrame, references: pd.DataFrame, *, window: int = 10) -> Figure:
    """Draw the loss per step of every arm, mean over seeds, with floor and chance, language by language (BA, Fig. 4).

    Args:
        losses: columns `language, arm, seed, step, loss`, of the experiment `languages`.
        references: `language, entropy_floor, chance_loss` in nats per scored token, as in its table `table1`.
        window: steps that are averaged, those before included.

    Thin lines are seeds.
    """
    require(losses, ("language", "seed", "step", "loss"), _LANGUAGES, name="table of losses")
    require(references, ("language", "entropy_floor", "chance_loss"), _LANGUAGES, name="table of references")
    languages = list(losses["language"].unique())
    figure, panels = _two_in_a_row(len(languages))
    for axes, language in zip(panels, languages, strict=True):
        levels = _where(references, "language", language).iloc[0]
        axes.axhline(levels["entropy_floor"], color=GREY, linewidth=1.0, linestyle="--", label="entropy floor")
        axes.axhline(levels["chance_loss"], color=GREY, linewidth=1.0, linestyle=":", label="chance")
        for arm, part in _by_arm(_where(losses, "language", language)):
            colour = _ARM_COLOURS.get(arm, INK)
            wide = part.pivot_table(index="step", columns="seed", values="loss")
            smooth = pd.DataFrame(wide.rolling(window, min_periods=1).mean()).to_numpy()  # steps seeds
            axes.plot(wide.index.to_numpy(), smooth, color=colour, linewidth=0.4, alpha=0.5)
            axes.plot(wide.index.to_numpy(), smooth.mean(1), color=colour, linewidth=1.6, label=arm)
        axes.set_title(language, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per scored token)")
        dress(axes)
    _shared_legend(figure)
    return figure


def structure_gap_curves(table: pd.DataFrame, references: pd.DataFrame) -> Figure:
    """Draw accuracy by depth or noise length of every arm with its interval, language by language (BA, section 1.2).

    Args:
        table: `structure_gap` of the experiment: `language, arm, size, mean, low, high, trained`.
        references: `language, chance_accuracy`, as in the table `table1`.

    The sizes of training are shaded.
    """
    require(table, ("language", "size", "mean", "low", "high", "trained"), "the experiment structure-gap")
    require(references, ("language", "chance_accuracy"), _LANGUAGES, name="table of references")
    languages = list(table["language"].unique())
    figure, panels = _two_in_a_row(len(languages))
    axis_names = {"dyck3": "depth", "bio_rotation": "noise letters"}
    for axes, language in zip(panels, languages, strict=True):
        here = _where(table, "language", language)
        trained = _where(here, "trained", True)["size"].to_numpy()
        if len(trained):
            axes.axvspan(trained.min(), trained.max(), color=PALE, linewidth=0, zorder=0, label="trained on")
        chance = _where(references, "language", language)["chance_accuracy"].iloc[0]
        axes.axhline(chance, color=GREY, linewidth=1.0, linestyle=":", label="chance")
        for arm, part in _by_arm(here):
            part = part.sort_values("size")
            colour = _ARM_COLOURS.get(arm, INK)
            axes.fill_between(part["size"], part["low"], part["high"], color=colour, alpha=0.12, linewidth=0)
            axes.plot(part["size"], part["mean"], "o-", color=colour, markersize=3, label=arm)
        axes.set_ylim(-0.02, 1.02)
        axes.set_title(language, fontsize=10, color=INK, loc="left")
        axes.set_xlabel(axis_names.get(language, "size"))
        axes.set_ylabel("accuracy on scored tokens")
        dress(axes)
    _shared_legend(figure)
    return figure


def position_losses(table: pd.DataFrame, trained_length: int = 128) -> Figure:
    """Draw the loss by position of learned frequencies and of rope settings, before and after a few steps there.

    Args:
        table: `extension_positions` of the experiment: `adapted, position, arm, loss, low, high`.
        trained_length: tokens, the line between what was trained and what was not.

    Bands are 95 % t intervals over seeds.
    """
    require(table, ("adapted", "position", "loss", "low", "high"), "the experiment longer-context")
    titles = {False: "as trained", True: "after a few steps at twice the length"}
    figure, panels = _two_in_a_row(len(titles))
    for axes, (adapted, title) in zip(panels, titles.items(), strict=True):
        here = _where(table, "adapted", adapted)
        axes.axvline(trained_length, color=GREY, linewidth=1.0, linestyle=":", label="trained length")
        for arm, part in _by_arm(here):
            part = part.sort_values("position")
            colour = _ARM_COLOURS.get(arm, INK)
            axes.fill_between(part["position"], part["low"], part["high"], color=colour, alpha=0.12, linewidth=0)
            axes.plot(part["position"], part["loss"], "o-", color=colour, markersize=3, label=arm)
        axes.set_title(title, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("first position of the bin")
        axes.set_ylabel("loss (nats per byte)")
        dress(axes)
    _shared_legend(figure)
    return figure


def setting_losses(table: pd.DataFrame) -> Figure:
    """Draw the losses of `standard` in every setting as a ratio to BA's, a panel per language, settings by `worst`.

    Args:
        table: `setting_search` of the experiment: `setting, language, scored, loss, paper_loss, worst`.

    The band holds ratios between 2/3 and 3/2. Settings stand in the same order in each panel, the nearest to BA first.
    """
    require(table, ("setting", "language", "scored", "loss", "paper_loss", "worst"), "the experiment setting")
    languages = list(table["language"].unique())
    figure = new_figure(2.5 * len(languages) + 0.8, 3.6)
    panels = figure.subplots(1, len(languages), sharey=True, squeeze=False)[0]
    for axes, language in zip(panels, languages, strict=True):
        here = _where(table, "language", language).sort_values(["worst", "setting"], ignore_index=True)
        axes.axhspan(2 / 3, 3 / 2, color=PALE, linewidth=0, zorder=0)
        axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle=":")
        for scored, colour in _SCORED_COLOURS.items():
            part = _where(here, "scored", scored)
            axes.plot(part.index, part["loss"] / part["paper_loss"], "o", color=colour, markersize=4, label=scored)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title(language, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("settings")
        dress(axes)
    panels[0].set_ylabel("loss / BA's loss of its standard model")
    dress(panels[0])
    _shared_legend(figure, "settings: the nearest to BA's first; the loss counts")
    return figure


def _where(table: pd.DataFrame, column: str, value: object) -> pd.DataFrame:
    return table.loc[table[column] == value]


def _mean_per_step(table: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    mean = table.pivot_table(index="step", values=column)
    return mean.index.to_numpy(), mean[column].to_numpy()


def _by_arm(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Rows of each arm in the table's order; a table without arms counts as one arm named ""."""
    if "arm" not in table:
        return [("", table)]
    return [(str(arm), table.loc[table["arm"] == arm]) for arm in table["arm"].unique()]


def _two_in_a_row(count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure as wide as its letters allow in a page column, and `count` panels of it, two in a row."""
    columns = min(2, count)
    rows = -(-count // columns)
    figure = new_figure(4.0 * columns + 0.2, 3.0 * rows + 0.5)
    panels = figure.subplots(rows, columns, squeeze=False).flatten().tolist()
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _shared_legend(figure: Figure, note: str | None = None) -> None:
    """Draw below all panels the legend of the first panel, and a note above its entries."""
    named = [(artist, name) for artist, name in zip(*figure.axes[0].get_legend_handles_labels(), strict=True) if name]
    legend_below(figure, named, [note], columns=max(1, min(5, len(named))))


_TITLES = {"retrieval": "retrieval: no rotation", "index": "index: one lap over the places"}
_WANTED = {"retrieval": (-0.05, 0.05), "index": (1.8, 2.1)}


def frequency_paths(paths: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """Draw Omega over the steps of every run, coloured by its start; runs that learned poorly are dashed.

    Args:
        paths: `task, start, seed, step, omega`, in units of pi/33, as `headline_paths` of the experiment.
        runs: `task, start, seed, success`, as its `headline_runs`.

    One panel per task. The band is what counts as success; -Omega is drawn as Omega, as one is the conjugate of the
    other.
    """
    for name, table, columns in (
        ("paths", paths, ("task", "start", "seed", "step", "omega")),
        ("runs", runs, ("task", "start", "seed", "success")),
    ):
        require(table, columns, "the experiment learned-frequency", name=f"table of {name}")
    tasks = [task for task in _TITLES if task in set(paths["task"])]
    starts = sorted(paths["start"].unique())
    colours = dict(zip(starts, colormaps["viridis"](np.linspace(0.0, 0.88, len(starts))), strict=True))
    succeeded = runs.set_index(["task", "start", "seed"])["success"].astype(bool)
    figure, all_axes = _two_in_a_row(len(tasks))
    for axes, task in zip(all_axes, tasks, strict=True):
        low, high = _WANTED[task]
        axes.axhspan(low, high, color=PALE, linewidth=0, zorder=0)
        for key, path in paths[paths["task"] == task].groupby(["start", "seed"]):
            assert isinstance(key, tuple)
            start, seed = key
            good = bool(succeeded[(task, start, seed)])
            axes.plot(
                np.asarray(path["step"]),
                np.abs(np.asarray(path["omega"])),
                color=colours[start],
                linewidth=0.9 if good else 1.4,
                linestyle="-" if good else (0, (4, 1.5)),
                alpha=0.75 if good else 1.0,
            )
        of_task = runs[runs["task"] == task]["success"].astype(bool)
        axes.set_title(
            f"{_TITLES[task]} ({int(of_task.sum())} of {len(of_task)} runs)", fontsize=10, color=INK, loc="left"
        )
        axes.set_xlabel("step")
        dress(axes)
    all_axes[0].set_ylabel(r"$|\Omega|$, in units of $\pi/33$ per token")
    handles = [all_axes[0].plot([], [], color=colours[start], label=f"{start:g}")[0] for start in starts]
    handles.append(all_axes[0].plot([], [], color=GREY, linestyle=(0, (4, 1.5)), label="learned poorly")[0])
    legend_below(figure, [(line, str(line.get_label())) for line in handles], ["start of the frequency"], columns=6)
    dress(all_axes[0])
    return figure
