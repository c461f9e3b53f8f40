"""The previous-token head of each run: its operator, and how far its kernel is from that of free runs."""

from functools import partial

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.common.seed_intervals import RUN_COLUMNS
from tlspectral_studies.fingerprint.constrained.formation import WRITTEN, refuse_mixed_runs
from tlspectral_studies.fingerprint.published import CONSTRAINED

_SPECTRA = ("dir_frac", "D_head", "rope_imag_frac", "dir_frac_raw", "D_head_raw", "rope_imag_frac_raw")
_columns = partial(columns, shared=(*CONSTRAINED, *RUN_COLUMNS))

REROUTING = Schema(
    "constrained_grid.rerouting",
    _columns("""
        arm, seed, step, layer, head, name, prev, dir_frac?, D_head?, rope_imag_frac?, dir_frac_raw?, D_head_raw?,
        rope_imag_frac_raw?
        peak_offset     | token | Offset with the largest score of the kernel; -1 is the previous token.
        kernel_distance | logit | Root mean square over offsets of the difference to a free run's kernel, each less its
                        |       | mean; mean over the other free runs with the same positions. NaN for fewer than two
                        |       | free runs.
        free_spread     | logit | Mean of kernel_distance over the free runs with the same positions.
        distance_ratio  | ratio | kernel_distance / free_spread.
    """),
    f"{WRITTEN}rerouting.parquet",
)


def previous_token_heads(heads: pd.DataFrame) -> pd.DataFrame:
    """The row of the head with the largest `prev` at the last evaluation of each run, as FP chooses it (section 10).

    Args:
        heads: `arm, seed, step, layer, head, prev` and any other columns.

    Returns:
        Those rows, one per arm and seed, in the table's order.

    Raises:
        ValueError: a table without rows, or several runs of one arm and seed.
    """
    if heads.empty:
        raise ValueError("the table of heads has no rows: there is no run to choose a head of")
    refuse_mixed_runs(heads, ["arm", "seed", "step", "layer", "head"])
    last = heads[heads["step"] == heads.groupby(["arm", "seed"])["step"].transform("max")]
    best = last.groupby(["arm", "seed"], sort=False)["prev"].idxmax()
    return last.loc[best].reset_index(drop=True)


def rerouting(heads: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Find the peak of the previous-token head's kernel and its distance from the free runs' (FP section 10, Fig. 5).

    The distance of two kernels is the root mean square, over offsets, of the difference of their scores after each has
    its mean over offsets taken off (a softmax does not see the mean). It is in units of the score.

    Args:
        heads: of a grid or the published tables: `arm, seed, step, layer, head, prev` and spectral columns.
        kernels: `arm, seed, step, layer, head, offset, score`.

    Returns:
        DataFrame, an arm and seed a row, of its previous-token head at its last evaluation. Columns of
        `constrained_grid.rerouting`: `arm, seed, step, layer, head, prev, dir_frac?, D_head?, rope_imag_frac?,
        dir_frac_raw?, D_head_raw?, rope_imag_frac_raw?, peak_offset, kernel_distance, free_spread, distance_ratio`.
        Spectral ones are those that `heads` has. The free arm of `rope_sym` is `rope_free`: the name up to the first
        underscore.

    Raises:
        ValueError: a table without rows, several runs of one arm and seed, or a run without a kernel.

    What it does not establish: that the kernel is what the head attends by. It is a mean of scores, to which contents
    contribute, over nine offsets; and runs that stopped soon after formation differ in how far training had gone.
    """
    chosen = previous_token_heads(heads)
    refuse_mixed_runs(kernels, ["arm", "seed", "step", "layer", "head", "offset"])
    keys = ["arm", "seed", "step", "layer", "head"]
    curves = kernels.merge(chosen[keys], on=keys).sort_values("offset", kind="stable")
    by_run = {
        (str(part["arm"].iloc[0]), int(part["seed"].iloc[0])): part
        for _, part in curves.groupby(["arm", "seed"], sort=False)
    }
    rows = []
    for row in chosen.to_dict(orient="records"):
        run = (str(row["arm"]), int(row["seed"]))
        if run not in by_run:
            head = f"L{row['layer']}H{row['head']} at step {row['step']}"
            raise ValueError(f"arm {run[0]}, seed {run[1]}: the table of kernels has none of {head}")
        free = {key: _curve(part) for key, part in by_run.items() if key[0] == free_arm(run[0])}
        kernel = by_run[run]
        scores = kernel["score"].to_numpy(dtype=np.float64)
        rows.append(
            {
                **{name: row[name] for name in (*keys, "prev", *_SPECTRA) if name in row},
                "peak_offset": int(kernel["offset"].to_numpy()[scores.argmax()]),
                "kernel_distance": _mean_distance(run, _curve(kernel), free),
                "free_spread": float(np.mean([_mean_distance(key, curve, free) for key, curve in free.items()]))
                if free
                else np.nan,
            }
        )
    table = pd.DataFrame(rows)
    return REROUTING.frame(table.assign(distance_ratio=table["kernel_distance"] / table["free_spread"]))


def free_arm(arm: str) -> str:
    """The arm without a constraint and with the same positions."""
    return f"{arm.split('_')[0]}_free"


def _mean_distance(
    run: tuple[str, int], curve: Float64[np.ndarray, "offsets"], free: dict[tuple[str, int], np.ndarray]
) -> float:
    distances = [float(np.sqrt(np.mean((curve - other) ** 2))) for key, other in free.items() if key != run]
    return float(np.mean(distances)) if len(free) > 1 else np.nan


def _curve(kernel: pd.DataFrame) -> Float64[np.ndarray, "offsets"]:
    scores = kernel["score"].to_numpy(dtype=np.float64)
    return scores - scores.mean()
