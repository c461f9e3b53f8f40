"""Residuals of linear controls. Constant, explained and tied values are found in spite of rounding."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float64, Int64

# Least squares rounds at about 1e-15 of a column's spread. Residuals closer than this share of it are made equal, so
# that noise does not order rows that are tied.
_TIE = 1e-13
# Where controls leave less than this share of a column, it is a linear function of them and the rest is rounding.
_EXPLAINED = 1e-10


def residuals(
    values: Float64[np.ndarray, "rows columns"], controls: Float64[np.ndarray, "rows controls"], names: Sequence[str]
) -> tuple[Float64[np.ndarray, "rows columns"], int, str | None]:
    """Compute the residuals of each column by least squares on the controls, with an intercept.

    Args:
        values: finite, at least one row.
        controls: finite; constant and repeated ones are allowed.
        names: of the columns, for the reason.

    Returns:
        The residuals (the columns themselves where no control varies), the number of linearly independent controls,
        and which column is constant or a linear function of the controls, else None.
    """
    remainder, closest, rank, reason = _fitted(values, controls, names)
    if rank and reason is None:
        remainder = np.column_stack([_tied(*column) for column in zip(remainder.T, closest, strict=True)])
    return remainder, rank, reason


def residual_ranks(
    values: Float64[np.ndarray, "rows columns"], controls: Float64[np.ndarray, "rows controls"], names: Sequence[str]
) -> tuple[Float64[np.ndarray, "rows columns"], int, str | None]:
    """Compute the mean ranks of `residuals`, 1 the lowest, in one sort per column. The rest is as there.

    Where a reason is given the first item is not ranked and has no meaning.
    """
    remainder, closest, rank, reason = _fitted(values, controls, names)
    if reason is None:
        remainder = np.column_stack([_mean_ranks(*column) for column in zip(remainder.T, closest, strict=True)])
    return remainder, rank, reason


def _fitted(
    values: Float64[np.ndarray, "rows columns"], controls: Float64[np.ndarray, "rows controls"], names: Sequence[str]
) -> tuple[Float64[np.ndarray, "rows columns"], Float64[np.ndarray, "columns"], int, str | None]:
    """Residuals before ties are made equal, below which distance they are ties, independent controls, and reason."""
    exact = np.zeros(values.shape[1])
    for column, name in zip(values.T, names, strict=True):
        if (column == column[0]).all():
            return values, exact, 0, f"{name} is constant"
    z = _standardised(controls)
    if not z.shape[1]:
        return values, exact, 0, None
    remainder = values - values.mean(0)
    spread = np.sqrt((remainder**2).mean(0))
    coefficients, _, rank, _ = np.linalg.lstsq(z, remainder, rcond=_EXPLAINED)
    remainder = remainder - z @ coefficients
    explained = np.sqrt((remainder**2).mean(0)) <= _EXPLAINED * spread
    reason = f"{names[int(explained.argmax())]} is a linear function of the controls" if explained.any() else None
    return remainder, _TIE * spread, int(rank), reason


def _tied(values: Float64[np.ndarray, "rows"], closest: float) -> Float64[np.ndarray, "rows"]:
    """Replace values that are no more than `closest` above the next lower one by that one."""
    order, starts = _groups(values, closest)
    tied = np.empty_like(values)
    tied[order] = values[order][starts][np.cumsum(starts) - 1]
    return tied


def _mean_ranks(values: Float64[np.ndarray, "rows"], closest: float) -> Float64[np.ndarray, "rows"]:
    """Rank values, those that `_tied` makes equal with the mean of their ranks."""
    order, starts = _groups(values, closest)
    first = np.flatnonzero(starts)
    past = np.concatenate([first[1:], [len(values)]])
    ranks = np.empty_like(values)
    ranks[order] = np.repeat((first + 1 + past) / 2, past - first)
    return ranks


def _groups(
    values: Float64[np.ndarray, "rows"], closest: float
) -> tuple[Int64[np.ndarray, "rows"], Bool[np.ndarray, "rows"]]:
    """Order of the values, and which of them in that order is more than `closest` above the one before."""
    order = np.argsort(values)
    starts = np.ones(len(values), dtype=bool)
    ascending = values[order]
    np.greater(ascending[1:] - ascending[:-1], closest, out=starts[1:])
    return order, starts


def _standardised(controls: Float64[np.ndarray, "rows controls"]) -> Float64[np.ndarray, "rows varying"]:
    """Return the controls that vary, each with mean 0 and variance 1."""
    centred = controls - controls.mean(0)
    spread = np.sqrt((centred**2).mean(0))
    varying = spread > _TIE * np.abs(controls).max(0, initial=0)
    return centred[:, varying] / spread[varying]
