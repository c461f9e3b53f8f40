"""When the circuit formed, by the loss or by loss and induction score, and tests of the predictions about it.

The tests are Table 4 of "Fingerprint, Not Blueprint" (FP, section 10).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.stats import benjamini_hochberg
from tlspectral.tables.schema import Schema, columns, require
from tlspectral_studies.common.seed_intervals import RUN_COLUMNS
from tlspectral_studies.fingerprint.constrained.presets import INDUCTION_THRESHOLD, loss_threshold
from tlspectral_studies.fingerprint.printed_pvalues import mann_whitney_pvalue, q_without_minimum
from tlspectral_studies.fingerprint.published import CONSTRAINED
from tlspectral_studies.fingerprint.statistics import mann_whitney
from tlspectral_studies.fingerprint.statistics.reasons import documented

CRITERIA = ("both", "loss")
_LEVEL = 0.05
WRITTEN = "`constrained_grid` of `tlspectral_studies.fingerprint.constrained`; `tlspectral study constrained` writes "
_columns = partial(columns, shared=(*CONSTRAINED, *RUN_COLUMNS))

FORMATION = Schema(
    "constrained_grid.formation",
    _columns("""
        arm, seed
        formed_loss        | step                  | First evaluation with ce_pred below half of ln V + 0.15 nats.
        formed_both        | step                  | First evaluation below that threshold with ind_best above 0.5.
        crossing_loss      | step                  | Where the line between two evaluations meets the threshold.
        ind_at_formed_loss | attention probability | ind_best at formed_loss.
        last_step          | step                  | Step of the run's last evaluation.
    """),
    f"{WRITTEN}formation.parquet",
)
FORMATION_TESTS = Schema(
    "constrained_grid.table4",
    columns("""
        criterion         | label       | What the steps are by: loss is formed_loss, both is formed_both.
        prediction        | label       | Number of the prediction.
        slower            | label       | Arm that is said to form later, not at all, or just as early.
        faster            | label       | Arm that it is compared with.
        n_slower          | count       | Seeds of the slower arm.
        n_faster          | count       | Seeds of the faster arm.
        not_formed_slower | count       | Runs of the slower arm that had not formed.
        not_formed_faster | count       | Runs of the faster arm that had not formed.
        mean_slower       | step        | Mean step of formation of the slower arm; else the last step counts.
        mean_faster       | step        | The same of the faster arm.
        sd_slower         | step        | Standard deviation of the same (ddof 1) over seeds; NaN for one seed.
        sd_faster         | step        | The same of the faster arm.
        ratio             | ratio       | mean_slower / mean_faster.
        statistic         | count       | Mann-Whitney U: pairs of runs in which the slower arm is later, ties half.
        pvalue            | probability | One-sided p of later formation, exact with ties. NaN for one seed.
        pvalue_floor?     | probability | Smallest pvalue that any labeling of these runs could have; NaN as pvalue.
        q                 | probability | pvalue after Benjamini and Hochberg, over the contrasts of the criterion.
        pvalue_paper      | probability | The same p as if there were no ties.
        q_paper           | probability | pvalue_paper adjusted without the cumulative minimum.
        rank_biserial     | ratio       | 2 U / (n_slower n_faster) - 1.
        hodges_lehmann    | step        | Median of all differences of steps, slower less faster.
        predicted         | label       | What was predicted of the slower arm: delay, no delay or no formation.
        verdict           | label       | Whether the prediction holds at q < 0.05, in the words of `formation_tests`.
    """),
    f"{WRITTEN}table4.parquet; `formation_tests` returns it",
)


def formation(evaluations: pd.DataFrame, *, vocabulary: int) -> pd.DataFrame:
    """Find the step at which each run formed its circuit, by two criteria.

    `loss`: the first evaluation with `ce_pred` below half of ln V + 0.15 nats, as in "Fingerprint, Not Blueprint" (FP,
    section 10). The loss of rotary models stays just above that for long before any induction head works, and may
    fall below it. So `both` also requires that `ind_best` exceeds 0.5 at the same evaluation.

    Args:
        evaluations: of a grid or the published tables: `arm, seed, step, ce_pred, ind_best`.
        vocabulary: tokens of the task, V.

    Returns:
        DataFrame, an arm and seed a row. Columns of `constrained_grid.formation`: `arm, seed, formed_loss, formed_both,
        crossing_loss, ind_at_formed_loss, last_step`. Steps are NaN where
        the run ended before.

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
        first = int(below.argmax()) if below.any() else None
        both = below & (induction > INDUCTION_THRESHOLD)
        rows.append(
            {
                "arm": key[0],
                "seed": key[1],
                "formed_loss": np.nan if first is None else steps[first],
                "formed_both": steps[both.argmax()] if both.any() else np.nan,
                "crossing_loss": np.nan if first is None else _crossing(steps, losses, first, threshold),
                "ind_at_formed_loss": np.nan if first is None else induction[first],
                "last_step": int(steps[-1]),
            }
        )
    return FORMATION.frame(rows)


def refuse_mixed_runs(table: pd.DataFrame, keys: list[str]) -> None:
    """Raise a ValueError where several runs share an arm and a seed, as runs of another strength of a penalty do."""
    twice = table.duplicated(keys)
    if twice.any():
        row = table.loc[twice].iloc[0]
        raise ValueError(
            f"arm {row['arm']}, seed {row['seed']} has several rows for one {', '.join(keys[2:])} (step {row['step']}):"
            " choose one run of each arm and seed, such as those of one strength of the penalty"
        )


def _crossing(steps: np.ndarray, losses: np.ndarray, index: int, threshold: float) -> float:
    """Step at which the line between evaluation `index` and the one before crosses the threshold."""
    if index == 0:
        return float(steps[0])
    share = (losses[index - 1] - threshold) / (losses[index - 1] - losses[index])
    return float(steps[index - 1] + share * (steps[index] - steps[index - 1]))


@dataclass(frozen=True)
class Contrast:
    """A prediction about two arms: the first forms later than the second, or never, or just as early."""

    prediction: str
    slower: str
    faster: str
    predicted: str


# In the order of FP's Table 4, on which its q-values depend. FP states the predictions only with their outcomes.
CONTRASTS = (
    Contrast("P1", "rope_free", "ape_free", "delay"),
    Contrast("P3", "ape_sym", "ape_free", "no delay"),
    Contrast("P4", "rope_sym", "rope_free", "no delay"),
    Contrast("P2", "rope_imag", "rope_free", "no formation"),
)


def formation_tests(formation: pd.DataFrame, *, finished: Sequence[bool] | pd.Series | None = None) -> pd.DataFrame:
    """Test whether arms form later than others, for the predictions P1 to P4 (FP, Table 4), by both criteria.

    One-sided Mann-Whitney tests of steps over seeds, exact with ties, and Benjamini-Hochberg over the contrasts of a
    criterion. A run that had not formed counts as formed at its last step: as late as any other, so that ranks are
    right where all runs have the same number of steps, and shifts are lower bounds.

    Args:
        formation: of `formation`, of a grid or of the published tables: `arm, seed, formed_both, formed_loss,
            last_step`.
        finished: whether the run of each row went to its end; None where all did.

    Returns:
        A row per criterion (`both`, `loss`) and contrast whose arms are both there. `pvalue_paper, q_paper` are as FP
        computed them.

        Predictions: P1, `delay`: rotary models form later than learned-absolute ones. P2, `no formation`: without
        Im(M_t) no circuit forms (the strong form). P3 and P4, `no delay`: a symmetric M costs neither learned-absolute
        nor rotary models time. Verdicts at q < 0.05: a `delay` `holds` or is `not shown`; `no delay` is `falsified` or
        `not falsified`; `no formation` `holds` where no run formed, is `falsified` where all did, else `some formed`.
        A contrast with a run that was not finished is `open`. One with an arm of one seed is `one seed`: there is
        nothing to test, and its statistics and standard deviation are NaN.

    Raises:
        ValueError: a missing column, or no rows.

    What it does not establish: more than an order of these arms at these sizes. With five seeds no p-value is below
    1/252; P4's other half, that the circuit works through phase under a symmetric M, is left to `rerouting`.
    """
    needed = ("arm", "seed", "last_step", *(f"formed_{criterion}" for criterion in CRITERIA))
    require(formation, needed, "formation", name="table of formation")
    ended = pd.Series(True if finished is None else list(finished), index=formation.index)
    present = set(formation["arm"])
    contrasts = [contrast for contrast in CONTRASTS if {contrast.slower, contrast.faster} <= present]
    unfinished = set(formation.loc[~ended, "arm"])
    rows = []
    for criterion in CRITERIA:
        family = [_row(formation, contrast, criterion) for contrast in contrasts]
        tested = [row for row in family if not np.isnan(row["pvalue"])]
        qvalues = benjamini_hochberg(np.array([row["pvalue"] for row in tested])).q
        paper_qvalues = q_without_minimum(np.array([row["pvalue_paper"] for row in tested]))
        for row, q, q_paper in zip(tested, qvalues, paper_qvalues, strict=True):
            row |= {"q": float(q), "q_paper": float(q_paper)}
        rows += [row | {"verdict": _verdict(row, bool(unfinished & {row["slower"], row["faster"]}))} for row in family]
    return documented(rows, FORMATION_TESTS)


_OF_A_TEST = ("statistic", "pvalue", "rank_biserial", "hodges_lehmann")


def _row(formation: pd.DataFrame, contrast: Contrast, criterion: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "criterion": criterion,
        "prediction": contrast.prediction,
        "slower": contrast.slower,
        "faster": contrast.faster,
        "predicted": contrast.predicted,
    }
    steps = {}
    for name in ("slower", "faster"):
        runs = formation.loc[formation["arm"] == row[name]]
        formed, last = (runs[column].to_numpy(dtype=np.float64) for column in (f"formed_{criterion}", "last_step"))
        steps[name] = np.where(np.isnan(formed), last, formed)
        row[f"n_{name}"], row[f"not_formed_{name}"] = len(runs), int(np.isnan(formed).sum())
        row[f"mean_{name}"], row[f"sd_{name}"] = float(steps[name].mean()), _deviation(steps[name])
    row["ratio"] = row["mean_slower"] / row["mean_faster"] if row["mean_faster"] else np.nan
    row |= dict.fromkeys((*_OF_A_TEST, "pvalue_floor", "pvalue_paper", "q", "q_paper"), np.nan)
    if min(row["n_slower"], row["n_faster"]) < 2:
        return row
    test = mann_whitney(steps["slower"], steps["faster"], alternative="greater")
    row["pvalue_paper"] = mann_whitney_pvalue(steps["slower"], steps["faster"], "greater")
    return row | {"pvalue_floor": test.floor} | {name: getattr(test, name) for name in _OF_A_TEST}


def _deviation(steps: np.ndarray) -> float:
    return float(steps.std(ddof=1)) if len(steps) > 1 else np.nan


def _verdict(row: dict[str, Any], is_open: bool) -> str:
    if is_open:
        return "open"
    if np.isnan(row["pvalue"]):
        return "one seed"
    if row["predicted"] == "no formation":
        formed = row["n_slower"] - row["not_formed_slower"]
        return "holds" if formed == 0 else "falsified" if formed == row["n_slower"] else "some formed"
    later = row["q"] < _LEVEL
    if row["predicted"] == "delay":
        return "holds" if later else "not shown"
    return "falsified" if later else "not falsified"
