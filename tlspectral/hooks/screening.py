"""Which of many estimated effects are measured: the largest, and random others by which the estimates are judged."""

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64, Int


def screened(
    estimates: Float64[np.ndarray, "rows"], most: int, seed: int
) -> tuple[Int[np.ndarray, "rows"], np.ndarray]:
    """Return the order of estimates by size, and a word for each row: `"top"`, `"control"` or `""`, not measured."""
    order = np.argsort(-np.abs(estimates), kind="stable")
    measured = np.full(len(order), "", dtype=object)
    measured[order[:most]] = "top"
    measured[np.random.default_rng(seed).permutation(order[most:])[:most]] = "control"
    return order, measured


def agreement(table: pd.DataFrame, kind: str) -> tuple[float | None, float | None]:
    """Return Spearman's correlation of `estimate` and `delta` in rows of a kind, and its p; None of too few."""
    rows = table.loc[table["measured"] == kind, ["estimate", "delta"]].to_numpy(float)
    if len(rows) < 3:
        return None, None
    found = scipy.stats.spearmanr(rows)
    return float(found.statistic), float(found.pvalue)  # pyright: ignore[reportAttributeAccessIssue]
