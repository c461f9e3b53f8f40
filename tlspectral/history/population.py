"""Percentiles of heads within their model, and medians over its heads against their null."""

import numpy as np
import pandas as pd

PERCENTILES = ("prev", "D_head", "rope_imag_frac", "dir_frac")
"""Columns of which a history holds the percentile within the model, as `<column>_pct`."""

_LEVEL = 0.95
_MEDIANS = 4000  # simulated; the ends of the interval then move by about 1/30 of its width between seeds


def within_model_percentile(values: pd.Series) -> pd.Series:
    """Compute rank over number, `rankdata / n`, ties averaged: 1 for the largest, 1/n for the smallest (FP section 9).

    Args:
        values: one number per head of a model; NaN stays NaN and is not counted.

    What it does not establish: distance. In a model without any structure some head has percentile 1 as well.
    """
    return values.rank(pct=True)


def population_medians(heads: pd.DataFrame, *, seed: int = 0) -> dict[str, float]:
    """Compute medians over the heads of one model, and their null of random orientations.

    The null of the median of D_head and of dir_frac has every head drawn independently from a normal distribution with
    the mean and deviation of its own matched null; `_null_low` and `_null_high` hold 95 % of such medians. For
    rope_imag_frac it is 1/2: rotating the pairs of a random W_K by 90 degrees swaps Re M_t and Im M_t and changes
    nothing else.

    Args:
        heads: the head table of one model, with `D_head`, `dir_frac`, `rope_imag_frac`, and `_null_mean`, `_null_std`
            of the first two.
        seed: of the simulated medians.

    Returns:
        `D_head_median`, `D_head_null_median`, `D_head_null_low`, `D_head_null_high`, the same of `dir_frac`, and
        `rope_imag_frac_median`, `rope_imag_frac_null_median`; NaN where a model has no such number.

    Source: "Fingerprint, Not Blueprint" (FP, sections 3 and 9), which draws one constant null; here it follows the
    singular values of the heads at each step.

    What it does not establish: an exact level. Heads that share keys (grouped queries), or were trained together, are
    not independent, so that the true spread is wider.
    """
    medians: dict[str, float] = {}
    # Without dropna, pandas 2 warns of a column that is empty.
    for column in ("D_head", "dir_frac"):
        medians[f"{column}_median"] = float(heads[column].dropna().median())
        medians |= _null_of_median(column, heads, seed)
    phase = float(heads["rope_imag_frac"].dropna().median())
    medians["rope_imag_frac_median"] = phase
    medians["rope_imag_frac_null_median"] = float("nan") if np.isnan(phase) else 0.5
    return medians


def _null_of_median(column: str, heads: pd.DataFrame, seed: int) -> dict[str, float]:
    null_moments = (
        heads.loc[heads[column].notna(), [f"{column}_null_mean", f"{column}_null_std"]].dropna().to_numpy(dtype=float)
    )
    names = [f"{column}_null_low", f"{column}_null_median", f"{column}_null_high"]
    if len(null_moments) == 0:
        return dict.fromkeys(names, float("nan"))
    drawn = np.random.default_rng(seed).normal(
        null_moments[:, 0], null_moments[:, 1], size=(_MEDIANS, len(null_moments))
    )  # medians heads
    quantiles = np.quantile(np.median(drawn, axis=1), [(1 - _LEVEL) / 2, 0.5, (1 + _LEVEL) / 2])
    return dict(zip(names, quantiles.tolist(), strict=True))
