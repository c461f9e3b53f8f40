"""Where the frequency of a one-head model goes while it learns a task that wants it slow, or one lap long."""

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.figure import Figure

from tlspectral.plots.style import GREY, INK, PALE, dress, new_figure
from tlspectral.tables.required import require

_TITLES = {"retrieval": "retrieval: no rotation", "index": "index: one lap over the places"}
_WANTED = {"retrieval": (-0.05, 0.05), "index": (1.8, 2.1)}


def headline_paths(paths: pd.DataFrame, runs: pd.DataFrame) -> Figure:
    """Omega over the steps of every run, coloured by where it started; runs that learned poorly are dashed.

    Args:
        paths: `task, start, seed, step, omega`, in units of pi/33, as `headline_paths` of the experiment.
        runs: `task, start, seed, success`, as its `headline_runs`.

    Returns:
        A figure outside pyplot, one panel per task. The band is what counts as success; -Omega is drawn as Omega, as
        one is the conjugate of the other.

    Raises:
        ValueError: a table without rows, or a missing column.
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
    figure = new_figure(4.4 * len(tasks) + 0.6, 3.6)
    all_axes = figure.subplots(1, len(tasks), squeeze=False)[0]
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
        axes.set_title(f"{_TITLES[task]} ({int(of_task.sum())} of {len(of_task)} runs)", fontsize=10, color=INK)
        axes.set_xlabel("step")
        dress(axes)
    all_axes[0].set_ylabel(r"$|\Omega|$, in units of $\pi/33$ per token")
    handles = [all_axes[0].plot([], [], color=colours[start], label=f"{start:g}")[0] for start in starts]
    handles.append(all_axes[0].plot([], [], color=GREY, linestyle=(0, (4, 1.5)), label="learned poorly")[0])
    figure.legend(handles=handles, title="start", loc="outside right upper", frameon=False, fontsize=8, labelcolor=INK)
    return figure
