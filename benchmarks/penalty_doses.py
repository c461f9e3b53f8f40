"""Does a tenth or a hundredth of the penalty delay the circuit as much: constrained runs at weights 1 and 0.1.

    python benchmarks/penalty_doses.py out/doses --jobs 2         # train and print; goes on where it was stopped
    python benchmarks/penalty_doses.py out/paper-doses --preset paper         # a quarter of an hour for each run
    python benchmarks/penalty_doses.py                            # trains nothing: the answers of the stored runs

Schedule, fixed before the first run. The arms `ape_sym`, `rope_sym` and `rope_imag` at weights 1 and 0.1, seeds 0 to 4,
everything else as in `tlspectral study constrained`. Weight 10 and the free arms are the stored runs of that command;
at the paper's size the published ones, which it reproduces step for step. A run that does not form counts as formed at
its last step.

* Delay: formation by both criteria, less that of the free arm of the same positions, mean over seeds. One-sided
  Mann-Whitney test against the free arm, exact with ties; Benjamini-Hochberg over the nine of arms and weights.
* Dose: is a larger weight later? Page's test over the weights 0.1, 1 and 10 within seeds, for each arm. The schedule
  had weight 0 as a dose too, which asks again whether there is a delay at all; it was left out afterwards.
* What is left: the penalised share at the last evaluation. Does a weight of 0.1 hold the part down at all?
* Which arm is the costliest? At weight 10, `ape_sym` by the published runs: is it so at 1 and 0.1? The delay of each
  other arm against that of `ape_sym`, one-sided Mann-Whitney test that the other is later, at each weight.
* Check, at the paper's size: the five published runs at weight 1 form at the steps of ours with the same arm and seed.

The symmetric arms come first, and are written and printed before the phase arm, whose p then join the correction.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import scipy.stats
import typer
from tlspectral_studies.fingerprint.constrained import constrained_grid, formation
from tlspectral_studies.fingerprint.constrained.presets import ARMS, PRESETS
from tlspectral_studies.fingerprint.published import published_constrained
from tlspectral_studies.fingerprint.statistics.rank_tests import mann_whitney

from tlspectral.stats import benjamini_hochberg
from tlspectral.tables import read_table

SEEDS = 5
WEIGHTS = (1.0, 0.1)
CONSTRAINED = {"ape_sym": "ape_free", "rope_sym": "rope_free", "rope_imag": "rope_free"}


def runs_of(evaluations: pd.DataFrame, weight: float, preset: str) -> pd.DataFrame:
    """Return a row per run: arm, weight, seed, steps of formation, share of the penalised part at the end."""
    rows = formation(evaluations, vocabulary=PRESETS[preset].task.vocabulary)
    last = evaluations.sort_values("step").groupby(["arm", "seed"])["penalty"].last()
    return with_steps(rows.join(last.rename("share"), on=["arm", "seed"]), weight)


def with_steps(formed: pd.DataFrame, weight: float) -> pd.DataFrame:
    """Return the rows of a table of formation with the weight of each run and the step that it is ranked by."""
    rows = formed.assign(weight=np.where(formed["arm"].str.endswith("free"), 0.0, weight))
    rows["steps"] = rows["formed_both"].fillna(rows["last_step"])
    return rows.reindex(columns=["arm", "weight", "seed", "formed_loss", "formed_both", "steps", "share"])


def stored(preset: str) -> pd.DataFrame:
    """Return the runs without a penalty and at weight 10; the share of those of the quick grid is not stored."""
    if preset == "paper":
        return runs_of(published_constrained(10.0).evaluations, 10.0, preset)
    return with_steps(read_table("docs/results/constrained/formation.parquet"), 10.0)


def trained(arms: list[str], folder: Path, preset: str, jobs: int) -> list[pd.DataFrame]:
    """Train what is missing and return the runs of each smaller weight, under the names of their arms."""
    found = []
    for weight in WEIGHTS:
        doses = [replace(ARMS[arm], name=f"{arm} at {weight:g}", penalty_weight=weight) for arm in arms]
        tables = constrained_grid(folder / f"{arms[0]}_{weight:g}", preset, arms=doses, seeds=SEEDS, n_jobs=jobs)
        rows = tables["evaluations"].assign(arm=lambda table: table["arm"].str.split(" ").str[0])
        found.append(runs_of(rows, weight, preset))
    return found


def doses(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per arm and weight: when it formed, how much later than the free arm, and what is left."""
    steps = runs.groupby(["arm", "weight"])["steps"].apply(np.asarray)
    rows = []
    for arm, free in ((arm, free) for arm, free in CONSTRAINED.items() if (arm, WEIGHTS[0]) in steps):
        for weight in (10.0, *WEIGHTS):
            these = runs[(runs["arm"] == arm) & (runs["weight"] == weight)]
            test = mann_whitney(steps[arm, weight], steps[free, 0.0], alternative="greater")
            row = {"arm": arm, "weight": weight, "formed": int(these["formed_both"].notna().sum()), "runs": len(these)}
            row |= {"mean_step": these["steps"].mean(), "sd": these["steps"].std(ddof=1)}
            row |= {"delay": row["mean_step"] - steps[free, 0.0].mean(), "shift": test.hodges_lehmann}
            rows.append(row | {"p": test.pvalue, "share_left": these["share"].mean()})
    table = pd.DataFrame(rows)
    table["q"] = benjamini_hochberg(table["p"].to_numpy()).q
    return table


def trend(runs: pd.DataFrame, arm: str) -> float:
    """Return p of Page's test that formation is later with a larger weight, within seeds; no penalty is no dose."""
    by_seed = [
        runs[(runs["arm"] == arm) & (runs["weight"] == weight)].sort_values("seed")["steps"].to_numpy()
        for weight in sorted((*WEIGHTS, 10.0))
    ]
    return scipy.stats.page_trend_test(np.stack(by_seed, axis=1)).pvalue


def costliest(runs: pd.DataFrame) -> pd.DataFrame:
    """Return a row per weight and other arm: its delay, that of `ape_sym`, and p that the other's is the longer."""
    steps = runs.groupby(["arm", "weight"])["steps"].apply(np.asarray)
    delays = {key: steps[key] - steps[CONSTRAINED[key[0]], 0.0].mean() for key in steps.index if key[1]}
    rows = []
    for (arm, weight), delay in delays.items():
        if arm != "ape_sym":
            ours = delays["ape_sym", weight]
            test = mann_whitney(delay, ours, alternative="greater")
            rows.append({"weight": weight, "arm": arm, "delay": delay.mean(), "ape_sym": ours.mean(), "p": test.pvalue})
    return pd.DataFrame(rows).sort_values(["weight", "arm"], ascending=[True, False], ignore_index=True)


def answers(runs: pd.DataFrame) -> str:
    """Return what is printed of the runs: the doses, the trends, and which arm is the costliest."""
    lines = [doses(runs).round(4).to_string(index=False)]
    for arm in (arm for arm in CONSTRAINED if arm in set(runs["arm"])):
        lines.append(f"{arm}: later with a larger weight, Page's test over 0.1, 1, 10: p = {trend(runs, arm):.2g}")
    return "\n".join([*lines, costliest(runs).round(4).to_string(index=False)])


def main(
    folder: Annotated[Path | None, typer.Argument(help="Folder of the runs; none: the stored table of runs.")] = None,
    output: Path = Path("docs/results/constrained"),
    preset: Annotated[str, typer.Option(help="quick or paper.")] = "quick",
    jobs: Annotated[int, typer.Option(help="Processes, one thread each.")] = 1,
) -> None:
    """Train the doses, write a row per run and print the answers."""
    if folder is None:
        typer.echo(answers(pd.read_csv(output / f"doses_{preset}.csv")))
        return
    found = []
    for arms in (["ape_sym", "rope_sym"], ["rope_imag"]):
        found += trained(arms, folder, preset, jobs)
        runs = pd.concat([*found, stored(preset)], ignore_index=True)
        runs.round(5).to_csv(output / f"doses_{preset}.csv", index=False)
        typer.echo(answers(runs))
    ours = pd.concat(found, ignore_index=True)
    if preset == "quick":
        return
    theirs = runs_of(published_constrained(1.0).evaluations, 1.0, preset).query("weight == 1")
    both = theirs.merge(ours, on=["arm", "weight", "seed"], suffixes=("_published", "_ours"))
    typer.echo(both[["arm", "seed", "formed_both_published", "formed_both_ours"]].to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
