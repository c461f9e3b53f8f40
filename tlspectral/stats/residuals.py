"""Residuals of columns after linear controls, and the partial rank correlation within layers with its p over layers.

Constant, explained and tied values are recognised in spite of rounding.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import scipy.stats
from jaxtyping import Float64, Int64

from tlspectral.stats.jackknife import FEWEST_CLUSTERS

# Least squares rounds at about 1e-15 of a column's spread. Residuals closer than this share of it are made equal, so
# that noise does not order rows that are tied.
_TIE = 1e-13
# Where controls leave less than this share of a column, it is a linear function of them and the rest is rounding.
_EXPLAINED = 1e-10


def residuals(
    values: Float64[np.ndarray, "rows columns"], controls: Float64[np.ndarray, "rows controls"], names: Sequence[str]
) -> tuple[Float64[np.ndarray, "rows columns"], int, str | None]:
    """Regress each column of `values` on the controls, with an intercept, by least squares. Return three things.

    `names`: names of the columns in the reason. All values must be finite.

    Returns:
        Residuals [rows, columns] (the columns themselves if no control varies); the number of linearly independent
            controls; and a reason if a column is constant or a linear function of the controls, else None.
    """
    for column, name in zip(values.T, names, strict=True):
        if (column == column[0]).all():
            return values, 0, f"{name} is constant"
    z = _standardised(controls)
    if not z.shape[1]:
        return values, 0, None
    remainder = values - values.mean(0)
    spread = np.sqrt((remainder**2).mean(0))
    coefficients, _, rank, _ = np.linalg.lstsq(z, remainder, rcond=_EXPLAINED)
    remainder = remainder - z @ coefficients
    explained = np.sqrt((remainder**2).mean(0)) <= _EXPLAINED * spread
    if explained.any():
        return remainder, int(rank), f"{names[int(explained.argmax())]} is a linear function of the controls"
    tied = [_tied(column, closest) for column, closest in zip(remainder.T, _TIE * spread, strict=True)]
    return np.column_stack(tied), int(rank), None


def _tied(values: Float64[np.ndarray, "rows"], closest: float) -> Float64[np.ndarray, "rows"]:
    """Return a copy of the values, in their order, with near ties made equal, so that rounding does not order them.

    A value becomes equal to the next lower value if they differ by at most `closest`.
    """
    order = np.argsort(values)
    ascending = values[order]
    starts = np.concatenate([[True], ascending[1:] - ascending[:-1] > closest])
    tied = np.empty_like(values)
    tied[order] = ascending[starts][np.cumsum(starts) - 1]
    return tied


def _standardised(controls: Float64[np.ndarray, "rows controls"]) -> Float64[np.ndarray, "rows varying"]:
    """Return a new array with the controls that vary, each with mean 0 and variance 1; constant controls are left
    out.
    """
    centred = controls - controls.mean(0)
    spread = np.sqrt((centred**2).mean(0))
    varying = spread > _TIE * np.abs(controls).max(0, initial=0)
    return centred[:, varying] / spread[varying]


def correlation_within_layers(
    variables: Float64[np.ndarray, "rows variables"],
    layers: Int64[np.ndarray, "rows"],
    method: Literal["hybrid", "rank"],
) -> tuple[float, float, int, int, str | None]:
    """Return five things: the partial rank correlation (-1 to 1), its two-sided p, the number of independent controls,
    the number of layers used, and the reason if the first two are NaN (else None).

    `variables`: columns x, y and controls, without NaN. `layers`: layer of each row. `method`: "hybrid" ranks the
    residuals, "rank" ranks the columns first. The mean of each layer is subtracted from every column, so only
    differences within layers count. Each layer contributes the sum over its heads of the product of the ranks of x and
    y. Without a correlation these sums have mean 0. They are independent if layers are, even if heads of a layer depend
    on each other. p comes from a t test over these sums.
    """
    layers = np.unique(layers, return_inverse=True)[1]
    sizes = np.bincount(layers)
    n_layers = int((sizes > 1).sum())  # a single head cannot be compared within its layer
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
    """Return the two-sided p of a t test that the contributions (one number per layer) have the mean 0; 1 if all
    contributions are 0.

    All are 0 if x and y do not both vary in any layer.
    """
    if not contributions.any():
        return 1.0
    error = contributions.std(ddof=1) / math.sqrt(len(contributions))
    t = abs(contributions.mean()) / error if error > 0 else math.inf
    return float(2 * scipy.stats.t.sf(t, len(contributions) - 1))
