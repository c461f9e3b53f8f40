"""When the circuit formed: the first evaluation at which the loss, or the loss and the induction score, say so."""

import numpy as np
import pandas as pd

from tlspectral.studies.fingerprint.constrained.columns import GRID
from tlspectral.studies.fingerprint.constrained.presets import INDUCTION_THRESHOLD, loss_threshold
from tlspectral.tables import named
from tlspectral.tables.required import require

CRITERIA = ("both", "loss")


def formation(evaluations: pd.DataFrame, *, vocabulary: int) -> pd.DataFrame:
    """Step at which each run formed its circuit, by two criteria.

    `loss`: the first evaluation with `ce_pred` below half of ln V + 0.15 nats, as in "Fingerprint, Not Blueprint" (FP,
    section 10). Rotary models rest for long just above that before any induction head works, and may dip below it. So
    `both` asks of the same evaluation that `ind_best` exceeds 0.5, too.

    Args:
        evaluations: of a grid or the published tables: `arm, seed, step, ce_pred, ind_best`.
        vocabulary: tokens of the task, V.

    Returns:
        A row per arm and seed: `arm, seed, formed_loss, formed_both` in steps, NaN where the run ended before;
        `crossing_loss`, where the line between two evaluations meets the threshold; `ind_at_formed_loss`, the induction
        score when the loss criterion was met; `last_step`, where the run ended.

    Raises:
        ValueError: a missing column, no rows, or several runs of one arm and seed.

    What it does not establish: that nothing of the circuit was there before. Steps are as coarse as the evaluations:
    runs that form between the same two have equal steps.
    """
    needed = ("arm", "seed", "step", "ce_pred", "ind_best")
    require(evaluations, needed, "a constrained grid", name="table of evaluations")
    refuse_mixed_runs(evaluations, ["arm", "seed", "step"])
    threshold = loss_threshold(vocabulary)
    rows = []
    for key, run in evaluations.groupby(["arm", "seed"], sort=False):
        assert isinstance(key, tuple)
        run = run.sort_values("step")
        steps, losses, induction = (run[name].to_numpy(dtype=np.float64) for name in ("step", "ce_pred", "ind_best"))
        below = losses < threshold
        at = int(below.argmax()) if below.any() else None
        both = below & (induction > INDUCTION_THRESHOLD)
        rows.append(
            {
                "arm": key[0],
                "seed": key[1],
                "formed_loss": np.nan if at is None else steps[at],
                "formed_both": steps[both.argmax()] if both.any() else np.nan,
                "crossing_loss": np.nan if at is None else _crossing(steps, losses, at, threshold),
                "ind_at_formed_loss": np.nan if at is None else induction[at],
                "last_step": int(steps[-1]),
            }
        )
    return named(pd.DataFrame(rows), GRID["formation"])


def refuse_mixed_runs(table: pd.DataFrame, keys: list[str]) -> None:
    """Raise a ValueError where several runs share an arm and a seed, as runs of another strength of a penalty do."""
    twice = table.duplicated(keys)
    if twice.any():
        row = table.loc[twice].iloc[0]
        raise ValueError(
            f"arm {row['arm']}, seed {row['seed']} has several rows for one {', '.join(keys[2:])} (step {row['step']}):"
            " choose one run of each arm and seed, such as those of one strength of the penalty"
        )


def _crossing(steps: np.ndarray, losses: np.ndarray, at: int, threshold: float) -> float:
    """Where the line to evaluation `at` from the one before crosses the threshold."""
    if at == 0:
        return float(steps[0])
    share = (losses[at - 1] - threshold) / (losses[at - 1] - losses[at])
    return float(steps[at - 1] + share * (steps[at] - steps[at - 1]))
