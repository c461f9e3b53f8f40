"""Eigenvalues of the null in float32: rounding against the Monte-Carlo error, and CPU cost against float64.

Run `python benchmarks/null_dtype.py` (about ten minutes of CPU), `--layer` for the cost of whole tables alone. Both
precisions take the same draws, alternately, in one process on one thread; the unit is CPU time. float32 is used here at
every size, also where `null_draws` would not use it. The layer has the attention of Llama-3-8B, with random weights.
"""

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import heads
import numpy as np
import scale
import torch
import typer

from tlspectral.nulls import CHUNK, NULL_COLUMNS, block_generator, haar_blocks, metrics_of_draws

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


def layer_cost(repeats: int = 1) -> None:
    """Print CPU a head of one layer's tables, both precisions alternately, and what the whole model would cost."""
    import tlspectral

    shape = replace(scale.LLAMA_8B, layers=1)
    n_heads = scale.LLAMA_8B.layers * shape.heads
    with tempfile.TemporaryDirectory(prefix="null_dtype_") as temporary:
        folder = Path(temporary) / "layer"
        scale.write_checkpoint(shape, folder)

        def seconds(draws: int, dtype: str) -> float:
            start = time.process_time()
            tlspectral.analyze_heads(folder, null_draws=draws, null_dtype=dtype, detectors=False, show_progress=False)
            return (time.process_time() - start) / shape.heads

        seconds(scale.NO_NULL, "float64")  # sets up torch and LAPACK
        for draws in scale.LLAMA_8B.draws:
            times = {"float64": [], "float32": [], "bare": []}
            for _ in range(repeats):
                for dtype in ("float64", "float32"):
                    times[dtype].append(seconds(draws, dtype))
                times["bare"].append(scale.bare_eigvals(shape.d_head, draws))
            double, single, bare = (float(np.median(samples)) for samples in times.values())
            print(
                f"one layer of {shape.name}, {shape.heads} heads, {draws} draws: {1e3 * double:.0f} ms a head in "
                f"float64, {1e3 * single:.0f} in float32, bare float64 eigvals {1e3 * bare:.0f}; times {n_heads} "
                f"heads: {n_heads * double:.0f} and {n_heads * single:.0f} CPU s",
                flush=True,
            )


def main(layer: bool = False) -> None:
    """Measure rounding at all shapes, then the tables of a layer; `--layer`: these alone."""
    if os.environ.get("OMP_NUM_THREADS") != "1":
        # BLAS reads its thread count when it is loaded.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": "1"})
    torch.set_num_threads(1)
    if not layer:
        for shape in SHAPES:
            random = heads.metrics_only(shape, *heads.factors(shape, 1)).singular_values[0]
            rounding(shape, "random factors", random)
            rounding(shape, "a decaying spectrum", np.exp(-np.linspace(0, 4, shape.d_head)))
            sys.stdout.flush()
    layer_cost()


if __name__ == "__main__":
    typer.run(main)
