"""`canonical_sweep`: what one head learns of each canonical task, rotary frequency by rotary frequency."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pandas as pd

from tlspectral.studies.common.run_folder import device_setting
from tlspectral.studies.positional_symbolic.canonical.model import CanonicalRun, angle_unit
from tlspectral.studies.positional_symbolic.canonical.trainer import (
    CanonicalSchedule,
    accuracy_by_position,
    schedule_of,
    train_canonical,
    validation_prompts,
)
from tlspectral.studies.positional_symbolic.canonical_tasks import TASKS, CanonicalTask
from tlspectral.studies.positional_symbolic.columns import CANONICAL_SWEEP
from tlspectral.tables import WorkPart, finished_parts, named, open_parts, stacked

BASE_ANGLES = (0.0, 0.01, 0.1, 0.25, 0.4, 0.5, 0.8, 1.0, 1.5, 2.0)
_FREQUENCIES = {"index": (1,), "retrieval": (1,), "partial_induction": (1, 2)}


@dataclass(frozen=True)
class CanonicalSweep:
    """Result of a sweep over tasks, frequencies and seeds: two tidy tables.

    Attributes:
        accuracy: one row per trained head: `task, n_frequencies, angle` (in units of pi/33), `theta` (the same in
            radians per token), `seed, n` (validation prompts), `accuracy, chance` (1 over the number of classes).
        by_position: the same heads, one row per position of the answer: `task, n_frequencies, angle, theta, seed,
            position` (from 0), `n, correct, accuracy`; NaN where the task has no answer at that position. `n` and
            `correct` are counts, so that positions can be pooled.
    """

    accuracy: pd.DataFrame
    by_position: pd.DataFrame


def canonical_sweep(
    tasks: tuple[str, ...] = TASKS,
    *,
    preset: str | CanonicalSchedule = "quick",
    angles: tuple[float, ...] = BASE_ANGLES,
    seeds: int = 3,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    n_jobs: int = 1,
    show_progress: bool = True,
) -> CanonicalSweep:
    """Train one-layer one-head models on canonical tasks at each rotary frequency (PS sections 4, 5 and D.1).

    Index and retrieval get heads of one frequency, the angle; partial induction those and heads of two, 0 and the
    angle. A seed decides the initial weights and the prompts at all angles, so that angles differ by nothing else,
    and points of one seed vary together.

    Args:
        tasks: names of the tasks.
        preset: `"quick"` (1200 steps of 256 fresh prompts, about 2 s a head on one core), `"paper"` (100 epochs of
            40,960 prompts in batches of 64, about a minute a head), or a schedule of your own.
        angles: frequencies in units of pi/33; 2 is one full rotation over the 33 tokens of a prompt.
        seeds: how many runs at each angle, with the seeds 0, 1, ....
        checkpoint_dir: a folder for one file per task, number of frequencies and seed; a sweep that was stopped
            continues there and gives the tables it would have given, to the bit on the same machine. Sweeps of other
            tasks or more seeds may share it; other angles or another schedule may not.
        device: where the heads are trained; prompts are the same on every device, rounding is not.
        n_jobs: workers among which these stacks are shared out, by joblib.
        show_progress: bars over stacks and steps.

    Returns:
        The two tables, sorted by task (in the order given), n_frequencies, angle and seed. `attrs` say how the heads
        were trained.

    Raises:
        ValueError: an unknown task, preset or device, no angles, angles or tasks given twice, or no seeds.
        IncompatibleCheckpoint: the folder holds a sweep with another schedule or other angles, or other files.

    What it does not establish: that a task cannot be learned at an angle where it was not: this is one architecture
    under one schedule. PS leaves out the width, the optimizer and the initial weights; see `CanonicalHeads` and
    `CanonicalSchedule` for what stands in their place. The seeds' spread is that of weights and training prompts; the
    validation prompts are the same for all.
    """
    for name, given in (("tasks", tasks), ("angles", angles)):
        if not given or len(set(given)) < len(given):
            raise ValueError(f"{name}={given}: give at least one, and each once")
    if seeds < 1:
        raise ValueError(f"seeds={seeds}: give the number of runs at each angle, at least 1")
    elsewhere = device_setting(device)
    plan = _Plan(schedule_of(preset), tuple(sorted(float(angle) for angle in angles)), device)
    show_steps = show_progress and n_jobs == 1
    stacks = [
        WorkPart(
            f"{task}_{n_frequencies}f_seed{seed:03d}", partial(_trained, plan, task, n_frequencies, seed, show_steps)
        )
        for task in tasks
        for n_frequencies in _FREQUENCIES[CanonicalTask(task).name]
        for seed in range(seeds)
    ]
    settings = {"schedule": asdict(plan.schedule), "angles": list(plan.angles), **elsewhere}
    folder = None
    if checkpoint_dir is not None:
        folder = open_parts(checkpoint_dir, {"sweep": "canonical tasks", "weights": "N(0, 1/d_model)", **settings})
    tables = finished_parts(
        stacks, folder, description="canonical sweep", unit="stack", n_jobs=n_jobs, show_progress=show_progress
    )
    return _assembled(tables.values(), {**settings, "seeds": seeds})


@dataclass(frozen=True)
class _Plan:
    """Settings that all stacks share."""

    schedule: CanonicalSchedule
    angles: tuple[float, ...]
    device: str


def _trained(plan: _Plan, name: str, n_frequencies: int, seed: int, show_progress: bool) -> pd.DataFrame:
    """Train heads at all angles in one stack and count their right answers by angle and position."""
    task, schedule = CanonicalTask(name), plan.schedule
    fixed = (0.0,) * (n_frequencies - 1)
    runs = [CanonicalRun((*fixed, angle * angle_unit(task)), seed) for angle in plan.angles]
    model = train_canonical(task, runs, schedule, device=plan.device, show_progress=show_progress).model
    counts = accuracy_by_position(model, validation_prompts(task, schedule))
    angle = counts["run"].map(dict(enumerate(plan.angles)))
    return pd.DataFrame(
        {
            "task": task.name,
            "n_frequencies": n_frequencies,
            "angle": angle,
            "theta": angle * angle_unit(task),
            "seed": seed,
            "position": counts["position"],
            "n": counts["n"],
            "correct": counts["correct"],
            "accuracy": counts["correct"] / counts["n"].where(counts["n"] > 0),
        }
    )


def _assembled(tables: Iterable[pd.DataFrame], attrs: dict[Any, Any]) -> CanonicalSweep:
    by_position = stacked(tables)
    order = {task: index for index, task in enumerate(by_position["task"].unique())}
    by_position = by_position.sort_values(
        ["task", "n_frequencies", "angle", "seed", "position"],
        key=lambda column: column.map(order) if column.name == "task" else column,
        ignore_index=True,
    )
    heads = ["task", "n_frequencies", "angle", "theta", "seed"]
    accuracy = by_position.groupby(heads, sort=False, as_index=False).agg({"n": "sum", "correct": "sum"})
    accuracy["accuracy"] = accuracy.pop("correct") / accuracy["n"]
    accuracy["chance"] = accuracy["task"].map({task: 1 / CanonicalTask(task).n_answers for task in order})
    sweep = CanonicalSweep(accuracy, by_position)
    for name, table in CANONICAL_SWEEP.items():
        frame: pd.DataFrame = getattr(sweep, name)
        frame.attrs = attrs
        named(frame, table)
    return sweep
