"""Does the fingerprint come before its function: histories of a grid of constrained runs, each step beside its null.

Run `python benchmarks/formation_histories.py out/paper` with the folder of `tlspectral study constrained --preset
paper`, finished or not. Cells that formed by the loss are read; what was measured lies under `--work`.

Schedule, fixed before the first history was measured. Every saved step is measured with 100 draws of a null of
equal singular values (`tls.head_history`). Three questions of "Fingerprint, Not Blueprint" (FP, section 9):

* Q2, `below`: at the last step before formation, does the median D_head over heads lie below 97.5 % of the medians of
  the null? FP: the median falls after formation. A sign test over runs, and over the free runs alone.
* Q1, `first`: which passes its level first, `prev` of the eventual head (.5) or its phase percentile (.9)? Rotary runs.
* Q3, `rank_*`: rank of the eventual head at step 0 by D_head and phase. Mean ranks against those of random heads.

The p over seeds was added when all cells were there: arms of a seed begin with the same weights.
"""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.stats
import typer
from tlspectral_studies.fingerprint.constrained import formation
from tlspectral_studies.fingerprint.constrained.saved_cells import cell_checkpoints
from tlspectral_studies.fingerprint.history_questions import (
    eventual_head_rank,
    formation_crossing,
    median_leaves_null,
)

import tlspectral as tls

VOCABULARY, DRAWS = 64, 20_000
RANKED = ("D_head_pct", "rope_imag_frac_pct")


def of_run(folder: Path, arm: str, seed: int, formed: float, work: Path) -> dict[str, object]:
    """Return the answers of one run."""
    history = tls.head_history(cell_checkpoints(folder, arm, seed), max_se=None, folder=work / f"{arm}-{seed}")
    summary, track = history.summary, history.track()
    before = summary.loc[summary["step"] < formed].iloc[-1]
    heads = history.heads.loc[history.heads["step"] == before["step"]]
    leaves = median_leaves_null(summary)
    row: dict[str, object] = {
        "arm": arm,
        "seed": seed,
        "formed": int(formed),
        "before": int(before["step"]),
        "best_prev": heads["prev"].max(),
        "D_head_median": before["D_head_median"],
        "null_low": before["D_head_null_low"],
        "null_median": before["D_head_null_median"],
        "below": before["D_head_median"] < before["D_head_null_low"],
        "outside_from": leaves.step,
        "side": leaves.side,
        "head": track["name"].iloc[-1],
        "prev_at_end": track["prev"].iloc[-1],
    }
    rotary = bool(track["rope_imag_frac_pct"].notna().all())
    row["first"] = formation_crossing(track).first if rotary else ""
    for column in RANKED[: 1 + rotary]:
        ranks = eventual_head_rank(track, percentiles=(column,))
        row["rank_" + column.removesuffix("_pct")] = ranks["rank"].iloc[0]
    row["n_heads"] = int(track["n_heads"].iloc[0])
    return row


def mean_rank_p(ranks: np.ndarray, n_heads: int) -> float:
    """Return how often as many random heads have a mean rank as far from the middle, on either side."""
    drawn = np.random.default_rng(0).integers(1, n_heads + 1, size=(DRAWS, len(ranks))).mean(1)
    middle = (n_heads + 1) / 2
    return float((1 + (np.abs(drawn - middle) >= abs(ranks.mean() - middle) - 1e-9).sum()) / (1 + DRAWS))


def seeds_p(rows: pd.DataFrame, column: str, middle: float) -> float:
    """Return the p of the mean rank by all sign flips over seeds: the arms of a seed begin with the same weights."""
    means = rows.groupby("seed")[column].mean().dropna().to_numpy() - middle
    flips = np.array(list(itertools.product((1, -1), repeat=len(means))))
    return float((np.abs((flips * means).mean(1)) >= abs(means.mean()) - 1e-9).mean())


def print_answers(table: pd.DataFrame) -> None:
    """Print the three answers, over all runs and over the free ones."""
    for which, rows in (("all runs", table), ("free runs", table[table["arm"].str.endswith("free")])):
        below, n = int(rows["below"].sum()), len(rows)
        p = scipy.stats.binomtest(below, n).pvalue if n else float("nan")
        typer.echo(f"{which}: the median is below its null before formation in {below} of {n}, sign test p = {p:.2g}")
        typer.echo(f"  first: {rows.loc[rows['first'] != '', 'first'].value_counts(dropna=False).to_dict()}")
        for column in RANKED:
            name = "rank_" + column.removesuffix("_pct")
            ranks = rows[name].dropna().to_numpy()
            if len(ranks):
                heads = int(rows["n_heads"].iloc[0])
                p, by_seed = mean_rank_p(ranks, heads), seeds_p(rows, name, (heads + 1) / 2)
                typer.echo(
                    f"  {column} at step 0: mean rank {ranks.mean():.2f} of {heads} in {len(ranks)}, p = {p:.2g}; over "
                    f"seeds p = {by_seed:.2g}"
                )


def main(folder: Path, output: Path = Path("docs/results/constrained"), work: Path = Path("out/histories")) -> None:
    """Measure the histories of a grid, write them as a table and print the answers."""
    cells = sorted((folder / "cells").glob("*.parquet"))
    if not cells:
        raise typer.BadParameter(f"{folder} has no finished cell")
    steps = formation(tls.read_table(folder / "evaluations.parquet"), vocabulary=VOCABULARY)
    formed = steps.loc[steps["formed_loss"].notna()]
    rows = [of_run(folder, run.arm, run.seed, run.formed_loss, work) for run in formed.itertuples()]
    table = pd.DataFrame(rows).round(4)
    table.to_csv(output / "histories.csv", index=False)
    typer.echo(table.to_string(index=False))
    print_answers(table)


if __name__ == "__main__":
    typer.run(main)
