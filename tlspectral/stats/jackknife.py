"""Interval and p-value of a correlation over heads, from leaving out one layer after another."""

import math

import numpy as np
import scipy.stats
from jaxtyping import Float64

# Two clusters are too few: a resample has three outcomes, and the spread between clusters one degree of freedom.
FEWEST_CLUSTERS = 3


def jackknife(
    correlation: float, left_out: Float64[np.ndarray, "clusters"], level: float
) -> tuple[tuple[float, float], float]:
    """Return the interval (low, high) and the two-sided p of a correlation, from leaving out one cluster at a time.

    Both use Student's t with clusters - 1 degrees of freedom. `left_out[i]`: the correlation without cluster i.
    `level`: level of the interval, such as 0.95. The jackknife's standard error is larger than the standard deviation
    over resamples, which is too small for few clusters (MacKinnon, Nielsen and Webb 2023). All three numbers are NaN
    for fewer than three clusters, or if a correlation is NaN.
    """
    n = len(left_out)
    if n < FEWEST_CLUSTERS or math.isnan(correlation) or np.isnan(left_out).any():
        return (math.nan, math.nan), math.nan
    error = float(np.sqrt((n - 1) / n * ((left_out - left_out.mean()) ** 2).sum()))
    half = error * float(scipy.stats.t.ppf((1 + level) / 2, n - 1))
    pvalue = float(2 * scipy.stats.t.sf(abs(correlation) / error, n - 1)) if error > 0 else float(correlation == 0)
    return (max(-1.0, correlation - half), min(1.0, correlation + half)), pvalue
