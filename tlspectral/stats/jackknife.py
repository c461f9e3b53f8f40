"""Interval and p of a correlation over heads from leaving out one layer after another."""

import math

import numpy as np
import scipy.stats
from jaxtyping import Float64

# With two clusters a resample has three different outcomes, and the spread between clusters one degree of freedom.
FEWEST_CLUSTERS = 3


def jackknife(
    correlation: float, left_out: Float64[np.ndarray, "clusters"], level: float
) -> tuple[tuple[float, float], float]:
    """Return interval and two-sided p by Student's t, with as many degrees of freedom as clusters less one.

    `left_out` are the correlations without each cluster. The jackknife's standard error is larger than the standard
    deviation over resamples, which with few clusters is too small (MacKinnon, Nielsen and Webb 2023). NaN with fewer
    than three clusters, or where there is no correlation without one of them.
    """
    n = len(left_out)
    if n < FEWEST_CLUSTERS or math.isnan(correlation) or np.isnan(left_out).any():
        return (math.nan, math.nan), math.nan
    error = float(np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()))
    half = error * float(scipy.stats.t.ppf((1 + level) / 2, n - 1))
    pvalue = float(2 * scipy.stats.t.sf(abs(correlation) / error, n - 1)) if error > 0 else float(correlation == 0)
    return (max(-1.0, correlation - half), min(1.0, correlation + half)), pvalue
