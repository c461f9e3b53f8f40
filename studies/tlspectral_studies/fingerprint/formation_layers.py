"""The order of events in constrained training by layer: where the median of D_head falls, and which attention is first.

In two-layer models the previous-token head is in the first layer and the induction heads are in the second. A median
over all heads mixes a layer that changes early with one that changes late.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64

from tlspectral_studies.fingerprint.constrained import formation
from tlspectral_studies.fingerprint.published import ConstrainedTables

LAYERS = ("0", "1", "both")
LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5)
_ONSET, _HALF = 0.1, 0.5  # shares of the way from the first to the last value


def crossing_step(steps: Float64[np.ndarray, " steps"], values: Float64[np.ndarray, " steps"], level: float) -> float:
    """Return the step at which a series first meets a level, by straight lines between evaluations; NaN if never.

    The series meets it from the side of its first value.
    """
    met = values >= level if values[0] <= level else values <= level
    if not met.any():
        return float("nan")
    at = int(met.argmax())
    if at == 0:
        return float(steps[0])
    share = (level - values[at - 1]) / (values[at] - values[at - 1])
    return float(steps[at - 1] + share * (steps[at] - steps[at - 1]))


def falls_by_layer(runs: ConstrainedTables, *, vocabulary: int, arms: Iterable[str]) -> pd.DataFrame:
    """Return when the median of D_head of each layer falls, beside formation by the loss.

    Args:
        runs: evaluations and heads of the runs; D_head is that of the weights as stored.
        vocabulary: of the task, for the level of the loss.
        arms: which arms. In an arm whose penalty holds M symmetric D_head is 0 by force, so leave these out.

    Returns:
        A row per arm, seed and layer (0, 1, both): `formed` (step at which the loss meets its level, between two
        evaluations), `start`, `at_formation` and `end` of the median, `share` of the fall that is done at formation,
        `onset` and `half` (steps at which a tenth and a half of the fall is done), and whether these two come after
        formation.
    """
    formed = formation(runs.evaluations, vocabulary=vocabulary).set_index(["arm", "seed"])["crossing_loss"]
    rows = []
    for key, heads in runs.heads.groupby(["arm", "seed"], sort=False):
        assert isinstance(key, tuple)
        arm, seed = key
        if arm not in arms:
            continue
        at = float(formed.loc[(arm, seed)])
        for layer in LAYERS:
            own = heads if layer == "both" else heads[heads["layer"] == int(layer)]
            medians = own.groupby("step")["D_head_raw"].median().sort_index()
            steps, values = medians.index.to_numpy(dtype=np.float64), medians.to_numpy(dtype=np.float64)
            way = values[-1] - values[0]
            onset, half = (crossing_step(steps, values, values[0] + share * way) for share in (_ONSET, _HALF))
            then = float(np.interp(at, steps, values))
            row = {"arm": arm, "seed": seed, "layer": layer, "formed": at, "start": values[0], "at_formation": then}
            row |= {"end": values[-1], "share": float(np.divide(then - values[0], way)), "onset": onset, "half": half}
            rows.append(row | {"onset_after": onset > at, "half_after": half > at})
    return pd.DataFrame(rows)


def previous_token_leads(runs: ConstrainedTables, *, vocabulary: int) -> pd.DataFrame:
    """Return in how many runs attention to the previous token is first: beside induction, beside the loss, summed.

    Returns:
        A row per comparison: `of` (eventual head, best head or summed over layer 0), `against` (ind or loss), `level`
        (a score, or "half of its way"), `first` of `runs`. The eventual head has the largest `prev` at the last step;
        ind is the best of layer 1.
    """
    formed = formation(runs.evaluations, vocabulary=vocabulary).set_index(["arm", "seed"])["crossing_loss"]
    found: dict[tuple[str, str, str], list[bool]] = {}
    for key, heads in runs.heads.groupby(["arm", "seed"], sort=False):
        assert isinstance(key, tuple)
        arm, seed = key
        prev, ind = (heads.pivot(index="step", columns="name", values=name).sort_index() for name in ("prev", "ind"))
        steps, at = prev.index.to_numpy(dtype=np.float64), float(formed.loc[(arm, seed)])
        second = ind[[name for name in ind if str(name).startswith("L1")]].max(axis=1).to_numpy(dtype=np.float64)
        series = {
            "eventual head": prev[prev.iloc[-1].idxmax()].to_numpy(dtype=np.float64),
            "best head": prev.max(axis=1).to_numpy(dtype=np.float64),
            "summed over layer 0": prev[[n for n in prev if str(n).startswith("L0")]].sum(axis=1).to_numpy(float),
        }
        halves = {name: _half_way(steps, values) for name, values in (series | {"ind": second}).items()}
        for name in ("eventual head", "summed over layer 0"):
            found.setdefault((name, "ind", "half of its way"), []).append(halves[name] < halves["ind"])
        for level in LEVELS:
            crossed = {name: crossing_step(steps, values, level) for name, values in series.items()}
            of_ind = crossing_step(steps, second, level)
            found.setdefault(("eventual head", "ind", str(level)), []).append(crossed["eventual head"] < of_ind)
            found.setdefault(("best head", "loss", str(level)), []).append(crossed["best head"] < at)
    rows = [(*key, sum(first), len(first)) for key, first in found.items()]
    return pd.DataFrame(rows, columns=["of", "against", "level", "first", "runs"])


def agreeing_seeds(table: pd.DataFrame, column: str) -> tuple[int, int, float]:
    """Return in how many seeds all arms have a flag, of how many, and the two-sided p of a sign test over seeds.

    Arms of one seed begin with the same weights, so the seed is the unit; a seed whose arms differ is not ordered.
    """
    agree = table.groupby("seed")[column].agg(["all", "any"])
    yes, no = int(agree["all"].sum()), int((~agree["any"]).sum())
    return yes, len(agree), float(scipy.stats.binomtest(yes, yes + no).pvalue) if yes + no else 1.0


def _half_way(steps: Float64[np.ndarray, " steps"], values: Float64[np.ndarray, " steps"]) -> float:
    return crossing_step(steps, values, values[0] + _HALF * (values[-1] - values[0]))
