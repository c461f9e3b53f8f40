"""The predictions on formation times, tested: Table 4 of "Fingerprint, Not Blueprint" (FP, section 10)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.stats import benjamini_hochberg, mann_whitney
from tlspectral.studies.fingerprint.constrained.columns import GRID
from tlspectral.studies.fingerprint.constrained.formation import CRITERIA
from tlspectral.studies.fingerprint.printed_pvalues import mann_whitney_pvalue, q_without_minimum
from tlspectral.tables import named
from tlspectral.tables.required import require

_LEVEL = 0.05


@dataclass(frozen=True)
class Contrast:
    """A prediction about two arms: the first forms later than the second, or never, or just as early."""

    prediction: str
    slower: str
    faster: str
    predicted: str


# In the order of FP's Table 4, on which its q-values depend. FP gives the predictions only by what became of them.
CONTRASTS = (
    Contrast("P1", "rope_free", "ape_free", "delay"),
    Contrast("P3", "ape_sym", "ape_free", "no delay"),
    Contrast("P4", "rope_sym", "rope_free", "no delay"),
    Contrast("P2", "rope_imag", "rope_free", "no formation"),
)


def formation_tests(formation: pd.DataFrame) -> pd.DataFrame:
    """Whether arms form later than others, for the predictions P1 to P4 (FP, Table 4), by both criteria of formation.

    One-sided Mann-Whitney tests of steps over seeds, exact with ties, and Benjamini-Hochberg over the contrasts of a
    criterion. A run that had not formed counts as formed at its last step: as late as any other, so that ranks are
    right where all runs have the same number of steps, and shifts are lower bounds.

    Args:
        formation: of `formation`, of a grid or of the published tables: `arm, seed, formed_both, formed_loss,
            last_step`.

    Returns:
        A row per criterion (`both`, `loss`) and contrast whose arms are both there: `criterion, prediction, slower,
        faster, n_slower, n_faster, not_formed_slower, not_formed_faster, mean_slower, mean_faster` and `sd_slower,
        sd_faster` (steps; sd with n - 1), `ratio` (of means), `statistic` (U), `pvalue, q`, `pvalue_paper, q_paper`
        (exact as if there were no ties; adjusted without the cumulative minimum: how FP's own came about),
        `rank_biserial`, `hodges_lehmann` (steps), `predicted`, `verdict`.

        Predictions: P1, `delay`: rotary models form later than learned-absolute ones. P2, `no formation`: without
        Im(M_t) no circuit forms (the strong form). P3 and P4, `no delay`: a symmetric M costs neither learned-absolute
        nor rotary models time. Verdicts at q < 0.05: a `delay` `holds` or is `not shown`; `no delay` is `falsified` or
        `not falsified`; `no formation` `holds` where no run formed, is `falsified` where all did, else `some formed`.

    Raises:
        ValueError: a missing column, or a contrast with an arm of fewer than two seeds.

    What it does not establish: more than an order of these arms at these sizes. With five seeds no p-value is below
    1/252; P4's other half, that the circuit works through phase under a symmetric M, is a matter of `rerouting`.
    """
    needed = ("arm", "seed", "last_step", *(f"formed_{criterion}" for criterion in CRITERIA))
    require(formation, needed, "formation", name="table of formation")
    present = set(formation["arm"])
    contrasts = [contrast for contrast in CONTRASTS if {contrast.slower, contrast.faster} <= present]
    rows = []
    for criterion in CRITERIA:
        family = [_row(formation, contrast, criterion) for contrast in contrasts]
        proper = benjamini_hochberg(np.array([row["pvalue"] for row in family])).q
        papers = q_without_minimum(np.array([row["pvalue_paper"] for row in family]))
        for row, q, q_paper in zip(family, proper, papers, strict=True):
            row |= {"q": float(q), "q_paper": float(q_paper)}
            rows.append({**row, "verdict": _verdict(row)})
    return named(pd.DataFrame(rows, columns=list(_COLUMNS)), GRID["table4"])


_COLUMNS = (
    "criterion",
    "prediction",
    "slower",
    "faster",
    *(f"{name}_{arm}" for name in ("n", "not_formed", "mean", "sd") for arm in ("slower", "faster")),
    "ratio",
    "statistic",
    "pvalue",
    "q",
    "pvalue_paper",
    "q_paper",
    "rank_biserial",
    "hodges_lehmann",
    "predicted",
    "verdict",
)


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
        if len(runs) < 2:
            raise ValueError(
                f"{contrast.prediction} compares {contrast.slower} with {contrast.faster} over seeds, and {row[name]} "
                f"has {len(runs)}: two at least are needed"
            )
        formed, last = (runs[column].to_numpy(dtype=np.float64) for column in (f"formed_{criterion}", "last_step"))
        steps[name] = np.where(np.isnan(formed), last, formed)
        row[f"n_{name}"], row[f"not_formed_{name}"] = len(runs), int(np.isnan(formed).sum())
        row[f"mean_{name}"], row[f"sd_{name}"] = float(steps[name].mean()), float(steps[name].std(ddof=1))
    test = mann_whitney(steps["slower"], steps["faster"], alternative="greater")
    row["pvalue_paper"] = mann_whitney_pvalue(steps["slower"], steps["faster"], "greater")
    row["ratio"] = row["mean_slower"] / row["mean_faster"] if row["mean_faster"] else np.nan
    return row | {name: getattr(test, name) for name in ("statistic", "pvalue", "rank_biserial", "hodges_lehmann")}


def _verdict(row: dict[str, Any]) -> str:
    if row["predicted"] == "no formation":
        formed = row["n_slower"] - row["not_formed_slower"]
        return "holds" if formed == 0 else "falsified" if formed == row["n_slower"] else "some formed"
    later = row["q"] < _LEVEL
    if row["predicted"] == "delay":
        return "holds" if later else "not shown"
    return "falsified" if later else "not falsified"
