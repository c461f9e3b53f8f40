"""Partial rank correlation of heads with other heads of their own layer, and its p over layers."""

import math
from typing import Literal

import numpy as np
import scipy.stats
from jaxtyping import Float64, Int64

from tlspectral.stats.clusters import FEWEST_CLUSTERS
from tlspectral.stats.residuals import residuals


def correlation_within_layers(
    variables: Float64[np.ndarray, "rows variables"],
    layers: Int64[np.ndarray, "rows"],
    method: Literal["hybrid", "rank"],
) -> tuple[float, float, int, int, str | None]:
    """Return statistic, p, independent controls, layers used, and why the numbers are NaN. Rows have no NaN.

    The columns are x, y and then the controls. The mean of each layer is subtracted from every column, so that
    differences between layers do not count. Each layer contributes the sum over its heads of the product of both ranks.
    Without a correlation these sums have mean 0. They are independent if layers are, however the heads of a layer
    depend on each other. p is that of a t test over the sums.
    """
    layers = np.unique(layers, return_inverse=True)[1]
    sizes = np.bincount(layers)
    n_layers = int((sizes > 1).sum())  # a layer of one head has nothing to be compared with
    if n_layers < FEWEST_CLUSTERS:
        return math.nan, math.nan, 0, n_layers, f"{n_layers} layers with two heads are fewer than {FEWEST_CLUSTERS}"
    if method == "rank":
        variables = scipy.stats.rankdata(variables, axis=0)
    in_layer = (layers[:, None] == np.arange(1, len(sizes))).astype(float)  # [rows, layers but the first]
    controls = np.column_stack([variables[:, 2:], in_layer])
    remainder, rank, reason = residuals(variables[:, :2], controls, ("x", "y"))
    n_controls = max(rank - in_layer.shape[1], 0)
    if reason is not None:
        return math.nan, math.nan, n_controls, n_layers, f"within layers, {reason}"
    if method == "hybrid":
        ranks = scipy.stats.rankdata(remainder, axis=0)
        means = np.stack([np.bincount(layers, column) for column in ranks.T], axis=1) / sizes[:, None]
        remainder = ranks - means[layers]
    x, y = remainder.T
    contributions = np.bincount(layers, x * y)[sizes > 1]
    statistic = float(np.clip(contributions.sum() / math.sqrt((x @ x) * (y @ y)), -1, 1))
    return statistic, _student(contributions), n_controls, n_layers, None


def _student(contributions: Float64[np.ndarray, "layers"]) -> float:
    """Two-sided p of a t test that the mean is 0; 1 where all are 0, as where x and y vary in no common layer."""
    if not contributions.any():
        return 1.0
    error = contributions.std(ddof=1) / math.sqrt(len(contributions))
    t = abs(contributions.mean()) / error if error > 0 else math.inf
    return float(2 * scipy.stats.t.sf(t, len(contributions) - 1))
