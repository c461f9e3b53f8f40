"""One cell of the grid: a model of one arm and one seed, trained and measured as it learns."""

from dataclasses import dataclass

import pandas as pd
from tqdm.auto import tqdm

from tlspectral.studies.common.model import AttentionOnlyTransformer
from tlspectral.studies.common.trainer import held_out_sequences, training_steps
from tlspectral.studies.fingerprint.constrained.measures import measure
from tlspectral.studies.fingerprint.constrained.presets import INDUCTION_THRESHOLD, Arm, Preset


@dataclass(frozen=True)
class CellRun:
    """A trained cell.

    Attributes:
        model: after the last step.
        evaluations: a row per evaluation: `arm, seed, step, loss, ce_pred, ce_unpred, prev_best, ind_best, penalty`.
        heads: a row per evaluation and head: `arm, seed, step, layer, head, prev, ind, dir_frac, D_head,
            rope_imag_frac, dir_frac_raw, D_head_raw, rope_imag_frac_raw`.
        kernels: a row per evaluation, head and offset: `arm, seed, step, layer, head, offset, score`.
    """

    model: AttentionOnlyTransformer
    evaluations: pd.DataFrame
    heads: pd.DataFrame
    kernels: pd.DataFrame

    def tables(self) -> dict[str, pd.DataFrame]:
        """The three tables by name."""
        return {"evaluations": self.evaluations, "heads": self.heads, "kernels": self.kernels}


def train_cell(preset: Preset, arm: Arm, seed: int, *, device: str = "cpu", show_progress: bool = False) -> CellRun:
    """Train one model of the grid from scratch (FP section 10).

    The loss is the cross-entropy over all targets, plus the arm's penalty times its weight. Where the preset has
    `stop_after`, training ends so many steps after the first evaluation at which both criteria of formation hold, or
    after all steps.

    Args:
        preset: sizes and schedule.
        arm: positions and constraint.
        seed: of initial weights and training sequences.
        device: where the model is trained.
        show_progress: a bar over steps.

    Raises:
        ValueError: a task that does not fit the architecture, or a penalty that does not fit the arm's positions.
    """
    settings = preset.training_of(seed)
    model = AttentionOnlyTransformer(preset.config_of(arm), seed=seed).to(device)
    held_out = held_out_sequences(preset.task, settings)
    evaluations, heads, kernels = [], [], []
    formed_at = None
    with tqdm(total=settings.steps, desc=arm.name, unit="step", leave=False, disable=not show_progress) as bar:
        for done in training_steps(
            model, preset.task, settings, penalty=arm.penalty, penalty_weight=arm.penalty_weight
        ):
            bar.update(done - bar.n)
            if not settings.evaluates_after(done):
                continue
            measurement = measure(model, held_out, arm.penalty)
            run = {"arm": arm.name, "seed": seed, "step": done}
            evaluations.append({**run, **measurement.evaluation})
            heads += [{**run, **row} for row in measurement.heads]
            kernels += [{**run, **row} for row in measurement.kernels]
            formed = (
                measurement.evaluation["ce_pred"] < preset.loss_threshold
                and measurement.evaluation["ind_best"] > INDUCTION_THRESHOLD
            )
            if formed_at is None and formed:
                formed_at = done
            if preset.stop_after is not None and formed_at is not None and done >= formed_at + preset.stop_after:
                break
    return CellRun(model, pd.DataFrame(evaluations), pd.DataFrame(heads), pd.DataFrame(kernels))
