"""One cell of the grid: a model of one arm and one seed, trained and measured as it learns."""

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from tlspectral_studies.common.model import AttentionOnlyTransformer
from tlspectral_studies.common.saved_training import SavedTraining
from tlspectral_studies.common.trainer import begin_training, held_out_sequences, training_steps
from tlspectral_studies.fingerprint.constrained.measures import measure
from tlspectral_studies.fingerprint.constrained.presets import INDUCTION_THRESHOLD, Arm, Preset


@dataclass(frozen=True)
class CellRun:
    """A trained cell.

    Attributes:
        model: after the last step.
        tables: `evaluations`, a row per evaluation; `heads`, per evaluation and head; `kernels`, and offset.
    """

    model: AttentionOnlyTransformer
    tables: dict[str, pd.DataFrame]


def train_cell(
    preset: Preset,
    arm: Arm,
    seed: int,
    *,
    saved: SavedTraining | None = None,
    until: int | None = None,
    device: str = "cpu",
) -> CellRun:
    """Train one model of the grid, or go on with it from its last saved step (FP section 10).

    The loss is the cross-entropy over all targets, plus the arm's penalty times its weight in the steps that have it.
    The penalty is measured at every evaluation, also where training is free by then. Where the preset has
    `stop_after`, training ends so many steps after the first evaluation at which both criteria of formation hold, or
    after all steps.

    Args:
        preset: sizes and schedule.
        arm: positions, constraint, and what is changed in the initial weights.
        seed: of initial weights and training sequences.
        saved: folder where weights, optimizer and measurements are saved every `preset.save_every` steps and at the
            end, and from whose last saved step the cell goes on; None keeps nothing. On one thread the weights and
            tables of a cell that was stopped are, to the bit, those of one that was not.
        until: train no further than this step; a later call goes on from there. None: to the end. A cell that is
            further already stays as it is.
        device: where the model is trained.

    Raises:
        ValueError: a task that does not fit the architecture, or a penalty that does not fit the arm's positions.
        IncompatibleCheckpoint: the folder holds another training, or a damaged state.
    """
    settings = preset.training_of(seed)
    training = begin_training(preset.config_of(arm), settings, device=device)
    if arm.initial_weights is not None:
        with torch.no_grad():
            arm.initial_weights(training.model)
    held_out = held_out_sequences(preset.task, settings)
    found = None if saved is None else saved.resume(training)
    start, measured = (0, {"evaluations": [], "heads": [], "kernels": []}) if found is None else found
    last = settings.steps if until is None else min(until, settings.steps)
    steps = training_steps(
        training,
        preset.task,
        settings,
        done=start,
        penalty=arm.penalty,
        penalty_weight=arm.penalty_weight,
        penalty_until=arm.penalty_until,
    )
    for done in steps:
        is_new = found is None or done > start
        if is_new and settings.evaluates_after(done):
            run = {"arm": arm.name, "seed": seed, "step": done}
            for name, rows in measure(training.model, held_out, arm.penalty).items():
                measured[name] += [{**run, **row} for row in rows]
        ends = done >= last or _has_stopped(preset, measured["evaluations"])
        if saved is not None and is_new and (ends or done % preset.save_every == 0):
            saved.save(training, done, measured)
        if ends:
            break
    return CellRun(training.model, {name: pd.DataFrame(rows) for name, rows in measured.items()})


def _has_stopped(preset: Preset, evaluations: list[dict[str, Any]]) -> bool:
    """Whether the last evaluation is at the step at which the cell ends, or behind it."""
    formed = (
        row["step"]
        for row in evaluations
        if row["ce_pred"] < preset.loss_threshold and row["ind_best"] > INDUCTION_THRESHOLD
    )
    return evaluations[-1]["step"] >= preset.last_step(next(formed, math.nan))
