"""`canonical_sweep`: what one head learns of each canonical task, rotary frequency by rotary frequency."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from tlspectral.tables.job import Job
from tlspectral.tables.measurement import bundled, finished_jobs, stacked, unbundled
from tlspectral.tables.resume_folder import open_resume_folder
from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.common.run_folder import device_setting
from tlspectral_studies.positional_symbolic.canonical.behaviour import CANONICAL, head_behaviour
from tlspectral_studies.positional_symbolic.canonical.model import CanonicalRun, angle_unit
from tlspectral_studies.positional_symbolic.canonical.schedule import CanonicalSchedule, schedule_of
from tlspectral_studies.positional_symbolic.canonical.trainer import (
    accuracy_by_position,
    train_canonical,
    validation_prompts,
)
from tlspectral_studies.positional_symbolic.canonical_tasks import TASKS, CanonicalBatch, CanonicalTask

BASE_ANGLES = (0.0, 0.01, 0.1, 0.25, 0.4, 0.5, 0.8, 1.0, 1.5, 2.0)
_HEAD = ["task", "n_frequencies", "angle", "theta", "seed"]
_MEASURED_WHILE_LEARNING = 4096  # prompts; a standard error of at most 0.008
_BEHAVIOUR_PROMPTS = 128
_FREQUENCIES = {"index": (1,), "retrieval": (1,), "partial_induction": (1, 2)}
CANONICAL_SWEEP = {
    name: Schema(
        f"canonical_sweep.{name}",
        columns(f"task, n_frequencies, angle, theta, seed, {described}", CANONICAL),
        "`tlspectral_studies.positional_symbolic.canonical.canonical_sweep`; `tlspectral study canonical -o FOLDER` "
        f"writes it as {name}.parquet",
    )
    for name, described in {
        "accuracy": """n, accuracy
            chance        | share | 1 over the number of classes of the task.
            most_frequent | share | Accuracy of answering what the context has most of: see `most_frequent_share`.
            s_pos, s_sym, exclusion_index, logit_std
        """,
        "by_position": "position, n, correct, accuracy",
        "progress": "step, position, n, correct, accuracy",
    }.items()
}


@dataclass(frozen=True)
class CanonicalSweep:
    """Result of a sweep over tasks, frequencies and seeds: three tidy tables.

    Attributes:
        accuracy: one row per trained head, on all validation prompts; how the head behaves is measured on the first 128
            of them (see `head_behaviour`). `angle` is in units of pi/33, `theta` the same in radians per token.
        by_position: the same heads, one row per position of the answer. `n` and `correct` are counts, so that positions
            can be pooled.
        progress: the same while the heads learn, on the first 4096 validation prompts, at step 0 and every `log_every`
            steps of the schedule, which is an epoch of the paper's preset.
    """

    accuracy: pd.DataFrame
    by_position: pd.DataFrame
    progress: pd.DataFrame


def canonical_sweep(
    tasks: tuple[str, ...] = TASKS,
    *,
    preset: str | CanonicalSchedule = "quick",
    angles: tuple[float, ...] = BASE_ANGLES,
    seeds: int = 3,
    folder: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    n_jobs: int = 1,
) -> CanonicalSweep:
    """Train one-layer one-head models on canonical tasks at each rotary frequency (PS sections 4, 5 and D.1).

    Index and retrieval get heads of one frequency, the angle; partial induction those and heads of two, 0 and the
    angle. A seed decides the initial weights and the prompts at all angles, so that angles differ by nothing else,
    and points of one seed vary together.

    Args:
        tasks: names of the tasks.
        preset: `"quick"` (1200 steps of 256 fresh prompts, about 2 s a head on one core), `"paper"` (100 epochs of
            40,960 prompts in batches of 64, 2.3 minutes a head), or a schedule of your own.
        angles: frequencies in units of pi/33; 2 is one full rotation over the 33 tokens of a prompt.
        seeds: how many runs at each angle, with the seeds 0, 1, ....
        folder: one for a file of tables per task, number of frequencies and seed, and in its folder
            `weights` one with the heads of each, for `saved_heads`. It is written once a minute while the heads learn:
            a sweep that was stopped continues there and gives the tables it would have given, to the bit on the same
            machine. Sweeps of other tasks or more seeds may share it; other angles or another schedule may not. None
            keeps no weights.
        device: where the heads are trained; prompts are the same on every device, rounding is not.
        n_jobs: workers among which these stacks are shared out, by joblib.

    Returns:
        The tables, sorted by task (in the order given), n_frequencies, angle and seed. `attrs` say how the heads
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
    schedule, ordered = schedule_of(preset), sorted(float(angle) for angle in angles)
    settings = {"schedule": asdict(schedule), "angles": ordered, **elsewhere}
    parts = None
    if folder is not None:
        parts = open_resume_folder(folder, {"sweep": "canonical tasks", "weights": "N(0, 1/d_model)", **settings})
    stacks = [
        Job(
            f"{task}_{n_frequencies}f_seed{seed:03d}",
            partial(_trained, task, n_frequencies, seed, schedule, ordered, parts and parts.path / "weights", device),
        )
        for task in tasks
        for n_frequencies in _FREQUENCIES[CanonicalTask(task).name]
        for seed in range(seeds)
    ]
    tables = finished_jobs(stacks, parts, description="canonical sweep", unit="stack", n_jobs=n_jobs)
    return _assembled(tables.values(), {**settings, "seeds": seeds})


def _trained(
    name: str,
    n_frequencies: int,
    seed: int,
    schedule: CanonicalSchedule,
    angles: list[float],
    folder: Path | None,
    device: str,
) -> pd.DataFrame:
    """Train heads at all angles in one stack and measure them; three tables in one, see `bundled`."""
    task = CanonicalTask(name)
    fixed = (0.0,) * (n_frequencies - 1)
    runs = [CanonicalRun((*fixed, angle * angle_unit(task)), seed) for angle in angles]
    prompts = validation_prompts(task, schedule)
    training = train_canonical(
        task,
        runs,
        schedule,
        measured=CanonicalBatch(*(values[:_MEASURED_WHILE_LEARNING] for values in prompts)),
        state=None if folder is None else folder / f"{name}_{n_frequencies}f_seed{seed:03d}.safetensors",
        device=device,
    )
    assert training.progress is not None
    behaviour = head_behaviour(training.model, CanonicalBatch(*(values[:_BEHAVIOUR_PROMPTS] for values in prompts)))
    tables = {
        "by_position": accuracy_by_position(training.model, prompts),
        "progress": training.progress,
        "behaviour": behaviour.assign(most_frequent=most_frequent_share(task, prompts)),
    }
    for table in tables.values():
        angle = table.pop("run").map(dict(enumerate(angles)))
        heads = {"task": task.name, "n_frequencies": n_frequencies, "angle": angle, "theta": angle * angle_unit(task)}
        for place, (column, values) in enumerate(heads.items()):
            table.insert(place, column, values)
        if "correct" in table:
            table["accuracy"] = table["correct"] / table["n"].where(table["n"] > 0)
    return bundled(tables)


def most_frequent_share(task: CanonicalTask, batch: CanonicalBatch) -> float:
    """Return the share of the context that has its most frequent answer, mean over prompts.

    It is the accuracy of answering the class that the context has most of, where the answer stands anywhere with equal
    probability: the most that a head without positions can reach in `"index"` (0.151 for 32 of 16 symbols), and one
    that sees neither symbols nor positions in `"retrieval"` (0.110 for 32 of 32 integers).
    """
    classes = batch.context // task.n_integers if task.name == "index" else batch.context % task.n_integers
    counts = torch.nn.functional.one_hot(classes, task.n_answers).sum(1)
    return float(counts.amax(1).double().mean() / task.length)


def _assembled(parts: Iterable[pd.DataFrame], attrs: dict[Any, Any]) -> CanonicalSweep:
    by_stack = [unbundled(part) for part in parts]
    tables = {name: stacked(stack[name] for stack in by_stack) for name in by_stack[0]}
    order = {task: index for index, task in enumerate(tables["by_position"]["task"].unique())}

    def ordered(table: pd.DataFrame) -> pd.DataFrame:
        columns = [name for name in (*_HEAD, "step", "position") if name in table and name != "theta"]
        return table.sort_values(
            columns, key=lambda column: column.map(order) if column.name == "task" else column, ignore_index=True
        )

    by_position, progress, behaviour = (ordered(tables[name]) for name in ("by_position", "progress", "behaviour"))
    accuracy = by_position.groupby(_HEAD, sort=False, as_index=False).agg({"n": "sum", "correct": "sum"})
    accuracy["accuracy"] = accuracy.pop("correct") / accuracy["n"]
    accuracy["chance"] = accuracy["task"].map({task: 1 / CanonicalTask(task).n_answers for task in order})
    measured = ["most_frequent", "s_pos", "s_sym", "exclusion_index", "logit_std"]
    accuracy[measured] = behaviour[measured]  # both are sorted by head
    made = {"accuracy": accuracy, "by_position": by_position, "progress": progress}
    return CanonicalSweep(**{name: schema.frame(made[name], attrs) for name, schema in CANONICAL_SWEEP.items()})
