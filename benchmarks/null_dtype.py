"""Eigenvalues of the null in float32: rounding against the Monte-Carlo error, and CPU cost against float64.

Run `python benchmarks/null_dtype.py` (about a minute of an idle core), `--cost` for the cost of tables alone. Both
precisions take the same draws, alternately, in one process on one thread; the unit is CPU time. Rounding is measured at
every size, also where `null_draws` would not use float32. The cost of a model's table is that of two heads, times their
number, with neither imports nor the shared blocks.
"""

import os
import sys
import time
from dataclasses import replace

import heads
import numpy as np
import torch
import typer

from tlspectral.algebra.nulls import CHUNK, NULL_COLUMNS, block_generator, haar_blocks, metrics_of_draws

DTYPES = (torch.float64, torch.float32)
SHAPES = (*heads.SHAPES, heads.Shape(4608, 256, False, heads=1, plain_draws=0, repeats=0, target=0))


def rounding(shape: heads.Shape, label: str, spectrum: np.ndarray) -> None:
    """Print the cost of a draw in both precisions, and the error of each column in shares of the sampling error."""
    blocks = haar_blocks(shape.n, shape.d_head, heads.DRAWS, block_generator(0, shape.n, shape.d_head))
    cost, parts = dict.fromkeys(DTYPES, 0.0), {dtype: [] for dtype in DTYPES}
    for chunk in blocks.split(CHUNK):
        for dtype in DTYPES:
            start = time.process_time()
            parts[dtype].append(metrics_of_draws(spectrum, chunk, dtype)[0])
            cost[dtype] += time.process_time() - start
    double, single = (1e3 * cost[dtype] / heads.DRAWS for dtype in DTYPES)
    print(
        f"{shape.name}, {label}, {heads.DRAWS} draws: {double:.2f} ms a draw in float64, {single:.2f} in float32, "
        f"{double / single:.2f}x"
    )
    for column in NULL_COLUMNS:
        exact, rounded = (np.concatenate([part[column] for part in parts[dtype]]) for dtype in DTYPES)
        sd = exact.std()
        of_mean = abs((rounded - exact).mean()) / (sd / np.sqrt(heads.DRAWS))
        of_sd = abs(rounded.std() - sd) / (sd / np.sqrt(2 * heads.DRAWS))
        observed = np.random.default_rng(0).normal(exact.mean(), sd, (10_000, 1))
        moved = ((rounded <= observed).sum(axis=1) != (exact <= observed).sum(axis=1)).mean()
        print(
            f"  {column:9s} sd {sd:.1e}, a draw off by at most {np.abs(rounded - exact).max():.0e}; of the sampling "
            f"error: mean {of_mean:.3%}, sd {of_sd:.3%}; observed values whose percentile moves: {moved:.2%}"
        )


def table_cost(shape: heads.Shape, model: str, n_heads: int) -> None:
    """Print CPU a head of its row in both precisions, beside bare LAPACK, and what the model's rows would cost."""
    factors = heads.factors(shape, shape.heads)
    spectra = heads.metrics_only(shape, *factors).singular_values
    for draws in (100, heads.DRAWS):
        blocks = haar_blocks(shape.n, shape.d_head, draws, block_generator(0, shape.n, shape.d_head))
        jobs = {
            "metrics": lambda: heads.metrics_only(shape, *factors),
            "bare": lambda blocks=blocks: heads.bare_lapack(spectra, blocks),
            "float64": lambda blocks=blocks: heads.whole_table(shape, *factors, blocks, "float64"),
            "float32": lambda blocks=blocks: heads.whole_table(shape, *factors, blocks, "float32"),
        }
        a_head = {name: heads.seconds(job) / shape.heads for name, job in jobs.items()}
        for dtype in ("float64", "float32"):
            null = (a_head[dtype] - a_head["metrics"]) / a_head["bare"]
            print(
                f"{shape.name}, {shape.heads} heads, {draws} draws in {dtype}: {1e3 * a_head[dtype]:.0f} ms a head, "
                f"the null {null:.3f} of bare float64 eigvals; {n_heads} heads ({model}): "
                f"{n_heads * a_head[dtype]:.0f} CPU s",
                flush=True,
            )


def main(cost: bool = False) -> None:
    """Measure rounding at all shapes, then the cost of tables; `--cost`: this alone."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # BLAS reads its thread count when it is loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    if not cost:
        for shape in SHAPES:
            random = heads.metrics_only(shape, *heads.factors(shape, 1)).singular_values[0]
            rounding(shape, "random factors", random)
            rounding(shape, "a decaying spectrum", np.exp(-np.linspace(0, 4, shape.d_head)))
            sys.stdout.flush()
    table_cost(replace(heads.SHAPES[-1], heads=2), "Llama-3-8B", 1024)


if __name__ == "__main__":
    typer.run(main)
