"""An interval for the ratio of two means over the same observations, and the share of cases that a sample can miss."""

import numpy as np
import scipy.stats
from jaxtyping import Float64

LEAST_SPREAD = 0.05
"""Smallest standard deviation of residuals, as a share of the mean of `whole`, for which an interval is given."""


def unseen_share(n: int, level: float = 0.95) -> float:
    """Return the largest share of cases that `n` independent draws all miss with probability 1 - `level`.

    A kind of case with a smaller share than this can be absent from a sample of `n` cases.

    >>> [round(unseen_share(n), 2) for n in (8, 32)]
    [0.31, 0.09]

    Source: the exact upper limit of a binomial share if none was seen (Clopper and Pearson 1934).
    """
    return 1 - (1 - level) ** (1 / n)


def ratio_interval(
    part: Float64[np.ndarray, "observations"], whole: Float64[np.ndarray, "observations"], level: float = 0.95
) -> tuple[float, float]:
    """Return the interval (low, high) of mean(part) / mean(whole) by Fieller's theorem.

    >>> import numpy as np
    >>> part, whole = np.array([1.0, 2.5, 2.5, 4.5]), np.array([2.0, 4.0, 6.0, 8.0])
    >>> low, high = ratio_interval(part, whole)
    >>> round(low, 2), round(high, 2)
    (0.26, 0.79)

    The interval contains every ratio r for which a t test of `part - r * whole` does not reject a mean of 0. It covers
    at exactly `level` for normal observations. Simulations for other distributions: docs/results/error_rates.md.

    Args:
        part: numerator of each observation.
        whole: denominator of the same observations.
        level: share of samples whose interval contains the ratio. Default: 0.95.

    Returns:
        Low and high end. Both are NaN for fewer than two observations, if the mean of `whole` does not differ from 0 at
            this level, or if the residuals `part - ratio * whole` have a standard deviation below 0.05 of the mean of
            `whole`. A sample with such small residuals contains no observation in which `part` fails, so it cannot show
            how often that happens: see `unseen_share`.

    Source: Fieller 1954, "Some problems in interval estimation".

    Not established: anything about observations that are not independent, about a `part` that was chosen because it is
    large on these observations, or about kinds of cases that the sample misses because they are rare.
    """
    n = len(part)
    if n < 2:
        return float("nan"), float("nan")
    squared = float(scipy.stats.t.ppf((1 + level) / 2, n - 1)) ** 2 / n
    covariance = np.cov(part, whole)
    # The ends are the roots of a r^2 - 2 b r + c.
    a = float(np.mean(whole) ** 2 - squared * covariance[1, 1])
    b = float(np.mean(part) * np.mean(whole) - squared * covariance[0, 1])
    c = float(np.mean(part) ** 2 - squared * covariance[0, 0])
    residuals = part - np.mean(part) / np.mean(whole) * whole if a > 0 else np.zeros(n)
    if not a > 0 or residuals.std(ddof=1) < LEAST_SPREAD * abs(np.mean(whole)):
        return float("nan"), float("nan")
    root = np.sqrt(max(0.0, b * b - a * c))
    return float((b - root) / a), float((b + root) / a)
