"""What a test of a sentence could have seen: detectable correlations, and rank tests between a few runs or models."""

import math
from functools import cache

import numpy as np
import scipy.stats
from jaxtyping import Bool, Float64

from tlspectral.errors import require_package
from tlspectral_studies.fingerprint.replication.sentences.sentence import LEVEL
from tlspectral_studies.fingerprint.statistics import mann_whitney

POWER = 0.8
_DRAWS = 4000


def detectable_correlation(n: int, tests: int = 1) -> float:
    """Smallest |rho| that a two-sided test finds with a power of 0.8, by Fisher's z.

    Args:
        n: independent rows.
        tests: size of the family: the level of one test is 0.05 / tests, the first step of Holm's procedure.
    """
    if n < 4:
        return 1.0
    normal = scipy.stats.norm.isf
    return math.tanh(float(normal(LEVEL / tests / 2) + normal(1 - POWER)) / math.sqrt(n - 3))


def correlation_power(rho: float, n: int) -> float:
    """Power of a two-sided test at 0.05 for a rank correlation, by Fisher's z."""
    shift, critical = math.atanh(rho) * math.sqrt(n - 3), float(scipy.stats.norm.isf(LEVEL / 2))
    return float(scipy.stats.norm.sf(critical - shift) + scipy.stats.norm.cdf(-critical - shift))


def correlations_power(sizes: dict[str, int], tests: int) -> str:
    """`detectable_correlation` of the largest and the smallest model, in words."""
    least, most = min(sizes.values()), max(sizes.values())
    low, high = detectable_correlation(most, tests), detectable_correlation(least, tests)
    found = f"{low:.2f}" if least == most else f"{low:.2f} (n = {most}) to {high:.2f} (n = {least})"
    family = f", Holm over {tests}" if tests > 1 else ""
    return f"|rho| of {found} is found with power 0.8{family}; heads taken as independent"


@cache
def shift_power(n_x: int, n_y: int, shift: float, tests: int = 1) -> float:
    """Power of the exact one-sided Mann-Whitney test for a shift in standard deviations, from 4000 normal draws.

    The level is 0.05 / tests.
    """
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((_DRAWS, n_x)) + shift, rng.standard_normal((_DRAWS, n_y))
    u = (x[:, :, None] > y[:, None, :]).sum((1, 2))
    return float((u >= _critical(n_x, n_y, tests)).mean())


@cache
def _critical(n_x: int, n_y: int, tests: int) -> int:
    """Smallest U at which the exact one-sided test is significant; one more than there is where none is."""
    for u in range(n_x * n_y, -1, -1):
        if _upper_tail(n_x, n_y, u) > LEVEL / tests:
            return u + 1
    return 0


def _upper_tail(n_x: int, n_y: int, u: int) -> float:
    """One-sided p of U = u without ties: n_x values, each placed above as many of n_y as it takes."""
    above = [min(n_y, max(0, u - n_y * index)) for index in range(n_x)]
    x = np.array(above) + 0.5 - 1e-3 * np.arange(n_x)
    return mann_whitney(x, np.arange(1.0, n_y + 1), alternative="greater").pvalue


def shifts_power(n_x: int, n_y: int, tests: int = 1) -> str:
    """Power for shifts of one and three standard deviations, in words."""
    one, three = (shift_power(n_x, n_y, shift, tests) for shift in (1.0, 3.0))
    family = f", Holm over {tests}" if tests > 1 else ""
    floor = 1 / math.comb(n_x + n_y, n_x)
    return (
        f"{n_x} runs against {n_y}: power {one:.2f} for a shift of 1 sd, {three:.2f} for 3 sd (exact, one-sided"
        f"{family}); smallest p {floor:.3f}"
    )


def models_power(n: int) -> str:
    """How often as many models or histories agree by the toss of a coin, in words."""
    return f"{n} of {n} agree by the toss of a coin with p = {0.5**n:.3g}; values have no published error"


def holm(pvalues: Float64[np.ndarray, "tests"]) -> Float64[np.ndarray, "tests"]:
    """p-values adjusted for their family by Holm's step-down procedure; a NaN, a test without data, counts as 1."""
    # statsmodels takes most of a second to import, which the other commands of the study should not cost.
    require_package("statsmodels", "A correction by Holm", "./studies, in a clone of the repository")
    from statsmodels.stats.multitest import multipletests

    return np.asarray(multipletests(np.where(np.isnan(pvalues), 1.0, pvalues), method="holm")[1])


def significant(pvalues: Float64[np.ndarray, "tests"]) -> Bool[np.ndarray, "tests"]:
    """Which tests of a family Holm's procedure rejects."""
    return holm(pvalues) <= LEVEL
