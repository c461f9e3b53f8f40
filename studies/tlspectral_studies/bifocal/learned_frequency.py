"""Spectral Evolution where the right frequency is known: one head with one learnable frequency on a canonical task.

Retrieval asks for a word at any position: its solution is no rotation. Index asks for a position: its solution is
about one rotation over the context ("Decoupling Positional and Symbolic Attention Behavior", section 4). The frequency
is learned, as in "Bifocal Attention", section 3, not swept.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.tables.schema import columns
from tlspectral_studies.bifocal.schedule import describe_tables
from tlspectral_studies.common.run_folder import RunFolder, finish_runs
from tlspectral_studies.common.seed_intervals import share_interval
from tlspectral_studies.positional_symbolic.canonical import (
    BASE_ANGLES,
    CanonicalRun,
    CanonicalSchedule,
    accuracy_by_position,
    angle_unit,
    train_canonical,
)
from tlspectral_studies.positional_symbolic.canonical.trainer import validation_prompts
from tlspectral_studies.positional_symbolic.canonical_tasks import CanonicalTask

TASKS = ("retrieval", "index")
SEEDS = (0, 1, 2, 3, 4)
_RETRIEVAL_WITHIN, _RETRIEVAL_ACCURACY = 0.05, 0.9
_INDEX_FROM, _INDEX_TO = 1.8, 2.1
describe_tables(
    "learned-frequency",
    {
        "headline_runs": """
            task, start, seed
            learned  | pi/33 rad/token | The frequency after training, as it is.
            accuracy | share           | Share of the validation prompts that are answered rightly after training.
            folded   | pi/33 rad/token | learned modulo 2 pi (66 units), without sign.
            success  | flag            | Retrieval: folded < .05 and accuracy > .9. Index: folded from 1.8 to 2.1.
        """,
        "headline_paths": """
            task, start, seed, step
            omega | pi/33 rad/token | The frequency after that many steps, as it is.
        """,
        "headline_shares": """
            task
            starts    | label | Which starting frequencies are counted: all, or those from .1 on.
            runs      | count | Runs counted. Those of one seed share weights and prompts.
            successes | count | Runs with success.
            share     | share | successes / runs.
            low       | share | Lower end of Wilson's 95 % interval of share, which takes runs as independent.
            high      | share | Upper end of that interval.
        """,
    },
    columns("""
        task  | label           | Canonical task: no rotation solves retrieval, about one over the context index.
        start | pi/33 rad/token | The head's frequency before training.
    """),
)
_FULL_ROTATION = 2 * np.pi / angle_unit(CanonicalTask("index"))  # units in 2 pi


def folded(omega: Float64[np.ndarray, "runs"]) -> Float64[np.ndarray, "runs"]:
    """Reduce frequencies in units of pi/33 modulo 2 pi (66 units) and without sign: integer positions see no more.

    A head with -Omega is the conjugate of one with Omega.
    """
    remainder = np.mod(omega, _FULL_ROTATION)
    return np.minimum(remainder, _FULL_ROTATION - remainder)


def learned_frequency(folder: RunFolder, schedule: CanonicalSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Train heads from ten frequencies with five seeds and record their frequencies.

    Success was defined before the runs: a retrieval run succeeds with |Omega| < .05 and accuracy > .9, an index run
    with Omega within 1.8 to 2.1, in units of pi/33 and `folded`.

    Args:
        folder: where finished stacks are kept, one per task and seed.
        schedule: of the training.
        n_jobs: processes; the numbers do not depend on it.

    Returns:
        `headline_runs`: a row per run. `headline_paths`: Omega over its steps. `headline_shares`: shares of successes
        with Wilson's 95 % interval, over all starts and over those from .1 on. Frequencies are in units of pi/33.

    What it does not establish: that larger models do this. The head has one frequency and nothing else to use.
    """
    jobs: dict[str, tuple[int, Callable[[], dict[str, pd.DataFrame]]]] = {
        f"headline_{task}_{seed}": (seed, partial(_stack, task, seed, schedule, folder.device))
        for task in TASKS
        for seed in SEEDS
    }
    stacks = finish_runs(folder, jobs, n_jobs=n_jobs)
    runs = _judged(pd.concat([tables["runs"] for tables in stacks.values()], ignore_index=True))
    paths = pd.concat([tables["paths"] for tables in stacks.values()], ignore_index=True)
    order = ["task", "start", "seed"]
    return {
        "headline_runs": runs.sort_values(order, ignore_index=True),
        "headline_paths": paths.sort_values([*order, "step"], ignore_index=True),
        "headline_shares": _shares(runs),
    }


def _stack(name: str, seed: int, schedule: CanonicalSchedule, device: str) -> dict[str, pd.DataFrame]:
    """All starts of one task and seed, trained side by side."""
    task = CanonicalTask(name)
    unit = angle_unit(task)
    runs = [CanonicalRun((start * unit,), seed) for start in BASE_ANGLES]
    trained = train_canonical(task, runs, schedule, learn_frequencies=True, device=device)
    paths = trained.frequencies.assign(
        task=name,
        start=[BASE_ANGLES[run] for run in trained.frequencies["run"]],
        omega=trained.frequencies["theta"] / unit,
    ).filter(["task", "start", "seed", "step", "omega"])
    right = accuracy_by_position(trained.model, validation_prompts(task, schedule))
    correct, counted = (np.asarray(right.groupby("run")[name].sum()) for name in ("correct", "n"))
    learned = np.asarray(paths["omega"])[np.asarray(paths["step"] == paths["step"].max())]
    ends = pd.DataFrame(
        {"task": name, "start": BASE_ANGLES, "seed": seed, "learned": learned, "accuracy": correct / counted}
    )
    return {"runs": ends, "paths": paths}


def _judged(runs: pd.DataFrame) -> pd.DataFrame:
    """Add `folded`, and `success` by the rules of `learned_frequency`."""
    frequency = folded(np.asarray(runs["learned"], dtype=float))
    low = (frequency < _RETRIEVAL_WITHIN) & (np.asarray(runs["accuracy"]) > _RETRIEVAL_ACCURACY)
    full_rotation = (frequency >= _INDEX_FROM) & (frequency <= _INDEX_TO)
    return runs.assign(folded=frequency, success=np.where(runs["task"] == "retrieval", low, full_rotation))


def _shares(runs: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for task, of_task in runs.groupby("task"):
        for starts, counted in (("all", of_task), ("from .1", of_task[of_task["start"] >= 0.1])):
            successes, count = int(counted["success"].sum()), len(counted)
            low, high = share_interval(successes, count)
            rows.append((task, starts, count, successes, successes / count, low, high))
    return pd.DataFrame(rows, columns=["task", "starts", "runs", "successes", "share", "low", "high"])
