"""Dyck-3 with power: twenty seeds, rates of one grid in two views, a test of equivalence; and BA's section 3.3."""

import itertools
import math
from functools import partial

import numpy as np
import pandas as pd

from tlspectral.tables.schema import columns
from tlspectral_studies.bifocal.depth_manifold import opener_outputs
from tlspectral_studies.bifocal.language_runs import LanguageRun, finish_language_runs, trained_model
from tlspectral_studies.bifocal.languages import REFERENCE, stacked
from tlspectral_studies.bifocal.llama import SpectralLlama
from tlspectral_studies.bifocal.schedule import EquivalenceSchedule, describe_tables
from tlspectral_studies.common.run_folder import RunFolder
from tlspectral_studies.common.seed_intervals import equivalence, intervals, mean_by, t_interval

_DEPTH = 16  # of the words whose depths are compared; BA speaks of depths 10 and 11
VIEWS = ("equal", "best")
_RATIO = {"ratio": "mean", "ratio_low": "low", "ratio_high": "high"}

describe_tables(
    "equivalence",
    {
        "equivalence_rates": """
            arm, learning_rate
            loss   | nat per scored token | Mean held-out loss over the tuning seeds.
            best   | flag                 | Whether the rate has the lowest loss of its arm.
            common | flag                 | Whether it is the rate with the lowest mean over arms.
        """,
        "equivalence_runs": "arm, learning_rate, seed, loss, accuracy",
        "equivalence": """
            view, arm, learning_rate
            mean   | nat per scored token | Mean over seeds of held-out loss.
            low, high, n, difference_mean, difference_low, difference_high
            pvalue | probability          | p of two one-sided paired t tests that it lies within the margin.
            bound  | nat per scored token | Smallest margin that the test would pass at the 5 % level.
            ratio  | ratio                | Geometric mean over seeds of the loss over that of standard.
            ratio_low  | ratio            | Low end of its 95 % interval, by Student's t of the logarithm.
            ratio_high | ratio            | High end of the same.
        """,
        "equivalence_beyond": """
            view, arm, learning_rate
            mean | share | Mean over seeds of accuracy at depths beyond training.
            low, high, n, difference_mean, difference_low, difference_high
        """,
        "depth_cosines": """
            arm
            mean    | cosine | Mean over seeds of a cosine of a head's mean outputs at two depths, mean over heads.
            low, high, n
            depths  | label  | Which depths are compared: 10 and 11, neighbours, or all.
            measure | label  | Of the means as they are (cosine), or less their mean over depths (centred).
        """,
    },
    columns("view | label | Which rates: one for all arms (equal), or each arm's own best (best)."),
)


def arms_with_power(folder: RunFolder, schedule: EquivalenceSchedule, *, n_jobs: int = 1) -> dict[str, pd.DataFrame]:
    """Train every arm on every reported seed at the common rate and at its own best one, and compare with `standard`.

    Returns:
        `equivalence_rates`: the tuning. `equivalence_runs`: a row per run. `equivalence`: per `view` (`equal`: the
        common rate for all; `best`: each arm's own) and arm the means, the paired difference to `standard`, and its
        test of equivalence. `equivalence_beyond`: the same of accuracy at depths beyond training. `depth_cosines`: of
        `depth_cosines`, means over heads and seeds, at the common rate.

    What it does not establish: equality at other sizes, rates or lengths of training; nor below the margin.
    """
    make = partial(finish_language_runs, folder, schedule, train=train_with_depths, n_jobs=n_jobs)
    grid = itertools.product(schedule.arms, schedule.rates)
    tuning = [LanguageRun("dyck3", *cell, seed) for seed, cell in itertools.product(schedule.tuning_seeds, grid)]
    rates = _rates(make(tuning))
    common = float(rates.loc[rates["common"], "learning_rate"].iloc[0])
    best = {str(row.arm): float(row.learning_rate) for row in rates.loc[rates["best"]].itertuples()}
    # The common rate first, seed by seed.
    wanted = [LanguageRun("dyck3", arm, common, seed) for seed in schedule.seeds for arm in schedule.arms]
    wanted += [LanguageRun("dyck3", arm, best[arm], seed) for seed in schedule.seeds for arm in schedule.arms]
    runs = make(list(dict.fromkeys(wanted)))
    measured = _ends(runs)
    by_size = stacked(runs, "by_size").assign(
        learning_rate=[run.learning_rate for run, tables in runs.items() for _ in tables["by_size"].index]
    )
    beyond = mean_by(by_size, ["arm", "learning_rate", "seed"], ["accuracy"])
    cosines = pd.concat(
        [
            tables["depths"].assign(arm=run.arm, seed=run.seed)
            for run, tables in runs.items()
            if run.learning_rate == common
        ]
    )
    return {
        "equivalence_rates": rates,
        "equivalence_runs": measured,
        "equivalence": _compared(measured, "loss", common, best, schedule.margin),
        "equivalence_beyond": _compared(beyond, "accuracy", common, best, None),
        "depth_cosines": _cosines_by_arm(cosines),
    }


def depth_cosines(model: SpectralLlama, *, depth: int = _DEPTH, n_words: int = 64, seed: int = 0) -> pd.DataFrame:
    """Cosine between the mean outputs of a head at every two nesting depths (BA 3.3: near 0 under spectral RoPE).

    Depth k is the k-th opener of a Dyck-3 word, and so also its k-th token. Means are over words.

    Args:
        model: trained on Dyck-3.
        depth: of the words; depths above 8 are beyond the training.
        n_words: fresh words.
        seed: of the words.

    Returns:
        `layer, head, depth, other, cosine` of the means as they are, `centred` of the means less their mean over all
        depths.

    What it does not establish: that the model uses the depth, nor depth apart from position.
    """
    first, second = np.triu_indices(depth, 1)
    tables = []
    for layer, of_layer in enumerate(opener_outputs(model, depth, n_words, seed)):
        means = of_layer.mean(0).double().numpy()  # heads depths d_head
        for head, mean in enumerate(means):
            table = pd.DataFrame({"layer": layer, "head": head, "depth": first + 1, "other": second + 1})
            for name, vectors in (("cosine", mean), ("centred", mean - mean.mean(0))):
                unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
                table[name] = (unit @ unit.T)[first, second]
            tables.append(table)
    return pd.concat(tables, ignore_index=True)


def train_with_depths(run: LanguageRun, schedule: EquivalenceSchedule, device: str = "cpu") -> dict[str, pd.DataFrame]:
    """One run: tables `held_out`, `by_size`, `losses` of `trained_model`, and `depths`, the cosines of the model."""
    model, tables = trained_model(run, schedule.runs(), device)
    return {**tables, "depths": depth_cosines(model)}


def _ends(runs: dict[LanguageRun, dict[str, pd.DataFrame]]) -> pd.DataFrame:
    rows = []
    for run, tables in runs.items():
        end = tables["held_out"].iloc[0]
        found = {"arm": run.arm, "learning_rate": run.learning_rate, "seed": run.seed}
        rows.append({**found, "loss": float(end["loss"]), "accuracy": float(end["accuracy"])})
    return pd.DataFrame(rows)


def _rates(tuning: dict[LanguageRun, dict[str, pd.DataFrame]]) -> pd.DataFrame:
    table = mean_by(_ends(tuning), ["arm", "learning_rate"], ["loss"])
    best = table.sort_values("loss").drop_duplicates("arm").index
    common = mean_by(table, ["learning_rate"], ["loss"]).sort_values("loss")["learning_rate"].iloc[0]
    return table.assign(best=table.index.isin(best), common=table["learning_rate"] == common)


def _compared(
    measured: pd.DataFrame, measure: str, common: float, best: dict[str, float], margin: float | None
) -> pd.DataFrame:
    tables = []
    for view in VIEWS:
        rate = measured["arm"].map(best) if view == "best" else common
        chosen = measured.loc[measured["learning_rate"] == rate]
        table = intervals(chosen, ["arm", "learning_rate"], measure)
        table.insert(0, "view", view)
        by_seed = chosen.pivot(index="seed", columns="arm", values=measure)
        rows = []
        for arm in table["arm"]:
            difference = by_seed[arm] - by_seed[REFERENCE]
            row = {f"difference_{name}": value for name, value in t_interval(difference).items() if name != "n"}
            if arm == REFERENCE:
                row = dict.fromkeys(row, np.nan)
            elif margin is not None:
                row |= equivalence(difference, margin)
                ratio = t_interval(np.log(by_seed[arm] / by_seed[REFERENCE]))
                row |= {name: math.exp(ratio[end]) for name, end in _RATIO.items()}
            rows.append(row)
        tables.append(table.join(pd.DataFrame(rows)))
    return pd.concat(tables, ignore_index=True)


def _cosines_by_arm(cosines: pd.DataFrame) -> pd.DataFrame:
    """Means over heads per seed, then t intervals over seeds: of 10 and 11, of all neighbours, of all depths."""
    neighbours = cosines.loc[cosines["other"] - cosines["depth"] == 1]
    depths = {"10 and 11": neighbours.loc[neighbours["depth"] == 10], "neighbours": neighbours, "all": cosines}
    tables = []
    for name, rows in depths.items():
        for measure in ("cosine", "centred"):
            by_seed = mean_by(rows, ["arm", "seed"], [measure])
            tables.append(intervals(by_seed, ["arm"], measure).assign(depths=name, measure=measure))
    return pd.concat(tables, ignore_index=True)
