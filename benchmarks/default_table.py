"""What the defaults of `analyze_heads` save, and what they move: a table that stops by itself against a full one.

Run `python benchmarks/default_table.py` (three CPU minutes, SmolLM2-135M), `--model tiny-rope` for a rehearsal. Both
tables are made in one process on one thread; the unit is CPU time. The full table has 200 sequences and 300 draws whose
eigenvalues are in float64, as they were before detectors could stop. `--rare` simulates heads that fire in 2 to
30 % of the sequences. `--cores 3` makes the table of weights (spectra and null) and the whole table with one thread and
with two, in turn, and prints the smallest seconds of each on the clock and on the CPU. On a machine without other work
two threads take half the time for the null and the spectra, and .6 to .7 of it for the whole table, whose model runs on
torch's own threads; CPU seconds stay equal. On n cores the table of weights takes 1 / n of its time up to one core a
head, and the hash of the weights, the check of the scores and the detectors remain.
"""

import time
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
import typer

import tlspectral
from tlspectral.heads.detectors.heads import FIRST_STOP
from tlspectral.tables.detector_columns import DETECTORS

FULL: dict[str, Any] = {"n_sequences": 200, "max_se": None, "null_draws": 300, "null_dtype": "float64"}
NULL = ("D_head", "imag_mass", "henrici")


def table_of(model: Any, **settings: Any) -> tuple[pd.DataFrame, float]:
    """Return a table and its CPU seconds."""
    began = time.process_time()
    heads = tlspectral.analyze_heads(model, **settings)
    return heads, time.process_time() - began


def on_cores(model: Any, repeats: int) -> None:
    """Print seconds of tables that were made with one thread and with two."""
    kinds: dict[str, dict[str, Any]] = {"weights alone": {"detectors": False}, "whole table": {}}
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {}
    tables: dict[str, pd.DataFrame] = {}
    before = torch.get_num_threads()
    for _ in range(repeats):
        for kind, settings in kinds.items():
            for threads in (1, 2):
                torch.set_num_threads(threads)
                began = time.perf_counter()
                heads, cpu = table_of(model, **settings)
                seconds.setdefault((kind, threads), []).append((time.perf_counter() - began, cpu))
                weights = heads.drop(columns=[name for name in heads if name.startswith(tuple(DETECTORS))])
                assert weights.equals(tables.setdefault(kind, weights)), "threads change a number"
    torch.set_num_threads(before)
    for kind in kinds:
        (clock, cpu), (clocks, cpus) = (np.min(seconds[kind, threads], axis=0) for threads in (1, 2))
        print(
            f"{kind}: {clock:.1f} s with one thread ({cpu:.1f} CPU s), {clocks:.1f} s with two ({cpus:.1f} CPU s): "
            f"{clocks / clock:.2f} of the time, {cpus / cpu:.2f} of the CPU time"
        )


def rare(share: float, max_se: float, n_sequences: int, repeats: int = 200_000) -> None:
    """Print what a head reads that attends fully in a share of the sequences, where it alone decides when to stop."""
    fired = np.random.default_rng(0).random((repeats, n_sequences)) < share
    score, error = np.full(repeats, np.nan), np.full(repeats, np.nan)
    look = FIRST_STOP
    while np.isnan(score).any():
        seen = fired[:, :look]
        mean, now = seen.mean(1), seen.std(1, ddof=1) / np.sqrt(look)
        stops = np.isnan(score) & ((now < max_se) | (look == n_sequences))
        score[stops], error[stops] = mean[stops], now[stops]
        look = min(2 * look, n_sequences)
    outside = (np.abs(score - share) > 2 * error).mean()
    print(
        f"a head that attends fully in {share:.0%} of the sequences reads {score.mean():.4f} in the mean; {share:g} "
        f"lies more than two errors from the score in {outside:.0%} of the seeds"
    )


def main(
    model: Annotated[str, typer.Option(help="Model, by its name for load_model.")] = "smollm2-135m",
    only_rare: Annotated[bool, typer.Option("--rare", help="The simulation alone.")] = False,
    cores: Annotated[int, typer.Option(help="One thread beside two alone, so many times; 0: not.")] = 0,
) -> None:
    """Print seconds, their ratio, and how far scores, ranks and z of the two tables lie apart."""
    if cores:
        on_cores(tlspectral.load_model(model), cores)
        return
    for share in (0.02, 0.05, 0.1, 0.3):
        rare(share, 0.02, 200)
    if only_rare:
        return
    torch.set_num_threads(1)
    loaded = tlspectral.load_model(model)
    quick, quick_seconds = table_of(loaded)
    full, full_seconds = table_of(loaded, **FULL)
    detectors = quick.attrs["detectors"]
    print(
        f"{model}, {len(quick)} heads: {quick_seconds:.1f} CPU s by default ({detectors['n_sequences']} sequences, "
        f"{quick.attrs['null_draws']} draws), {full_seconds:.1f} in full (200, 300): "
        f"{full_seconds / quick_seconds:.2f}x"
    )
    for name in DETECTORS:
        off, strongest = (quick[name] - full[name]).abs(), [set(one[name].nlargest(10).index) for one in (quick, full)]
        print(
            f"  {name}: off by {off.max():.4f} at most, rms {np.sqrt((off**2).mean()):.4f}; largest error "
            f"{quick[f'{name}_se'].max():.4f} ({full[f'{name}_se'].max():.4f} in full), median "
            f"{quick[f'{name}_se'].median():.5f}; ten strongest in common: {len(set.intersection(*strongest))}; "
            f"Spearman {quick[name].corr(full[name], method='spearman'):.4f}"
        )
    for name in NULL:
        z, of_full = quick[f"{name}_z"], full[f"{name}_z"]
        changed = ((z.abs() > 2) != (of_full.abs() > 2)).sum()
        print(
            f"  {name}_z: Spearman {z.corr(of_full, method='spearman'):.5f}; |z| > 2 changes for {changed}; null mean "
            f"off by {(quick[f'{name}_null_mean'] - full[f'{name}_null_mean']).abs().max():.4f} at most"
        )


if __name__ == "__main__":
    typer.run(main)
