"""Residuals of linear controls. Constant, explained and tied values are found in spite of rounding."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

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
    """Replace values that are no more than `closest` above the next lower one by that one."""
    order = np.argsort(values)
    ascending = values[order]
    starts = np.concatenate([[True], ascending[1:] - ascending[:-1] > closest])
    tied = np.empty_like(values)
    tied[order] = ascending[starts][np.cumsum(starts) - 1]
    return tied


def _standardised(controls: Float64[np.ndarray, "rows controls"]) -> Float64[np.ndarray, "rows varying"]:
    """Return the controls that vary, each with mean 0 and variance 1."""
    centred = controls - controls.mean(0)
    spread = np.sqrt((centred**2).mean(0))
    varying = spread > _TIE * np.abs(controls).max(0, initial=0)
    return centred[:, varying] / spread[varying]
