"""What the rule of a sentence could have found: its least p, and the smallest effect that it finds with power .8."""

import math
from functools import cache

import numpy as np
import scipy.stats
from jaxtyping import Bool, Float64

from tlspectral.errors import require_package
from tlspectral_studies.fingerprint.replication.sentences.sentence import LEVEL, Power
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


def correlations_power(sizes: dict[str, int], tests: int = 1, more: str = "") -> Power:
    """`Power` of rank correlations on models with these numbers of heads, in the smallest of them.

    The least p is that of a perfect order, 2 / n!, times the tests of the family.
    """
    least, most = min(sizes.values()), max(sizes.values())
    low, high = detectable_correlation(most, tests), detectable_correlation(least, tests)
    found = f"{low:.2f}" if least == most else f"{low:.2f} (n = {most}) to {high:.2f} (n = {least})"
    family = f", Holm over {tests}" if tests > 1 else ""
    said = f"|rho| of {found} is found with power 0.8{family}; heads taken as independent{more}"
    least_p = min(1.0, tests * 2 * math.exp(-math.lgamma(least + 1)))
    return Power(said, least_p, high, f"|rho| in the smallest model, n = {least}")


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


@cache
def detectable_shift(n_x: int, n_y: int, tests: int = 1) -> float:
    """Smallest shift in standard deviations that the test of `shift_power` finds with a power of 0.8, to 0.01.

    Infinite where the test cannot be significant.
    """
    if _critical(n_x, n_y, tests) > n_x * n_y:
        return math.inf
    low, high = 0.0, 20.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if shift_power(n_x, n_y, middle, tests) >= POWER else (middle, high)
    return high


def shifts_power(n_x: int, n_y: int, tests: int = 1) -> Power:
    """`Power` of exact one-sided Mann-Whitney tests of some runs against others, in a family of tests."""
    one, three = (shift_power(n_x, n_y, shift, tests) for shift in (1.0, 3.0))
    family = f", Holm over {tests}" if tests > 1 else ""
    floor = 1 / math.comb(n_x + n_y, n_x)
    return Power(
        f"{n_x} runs against {n_y}: power {one:.2f} for a shift of 1 sd, {three:.2f} for 3 sd (exact, one-sided"
        f"{family}); smallest p {floor:.3f}",
        min(1.0, tests * floor),
        detectable_shift(n_x, n_y, tests),
        "shift of an arm, in sd of its runs",
    )


def apart_power(n_x: int, n_y: int) -> Power:
    """`Power` of the exact permutation of models between two groups: only a complete separation is significant."""
    floor = 1 / math.comb(n_x + n_y, n_x)
    smallest = detectable_shift(n_x, n_y)
    no_power = ", so no power at 0.05" if floor > LEVEL else ""
    said = f"exact permutation of {n_x} models against {n_y}: smallest p 1/{math.comb(n_x + n_y, n_x)}{no_power}"
    return Power(f"{said}; heads of a model are no independent units", floor, smallest, "difference, in sd of models")


def signs_power(n: int) -> Power:
    """`Power` of a two-sided sign test of n ordered runs: its least p, and the smallest share of one order."""
    least_p = min(1.0, 2 * 0.5**n)
    return Power(
        f"{n} of {n} agree by the toss of a coin with two-sided p = {least_p:.2g}",
        least_p,
        detectable_share(n),
        f"share of runs with one order, of {n}",
    )


def detectable_share(n: int) -> float:
    """Smallest share of one order that a two-sided sign test of n runs finds with a power of 0.8; infinite if none."""
    significant_from = next((k for k in range(n // 2 + 1, n + 1) if scipy.stats.binomtest(k, n).pvalue <= LEVEL), None)
    if significant_from is None:
        return math.inf
    return float(scipy.stats.beta.ppf(POWER, significant_from, n - significant_from + 1))


def no_sample(n: int, units: str, more: str = "") -> Power:
    """`Power` of a sentence about all of some units, every one of which is there: one more or less decides."""
    return Power(f"no sample: all {n} {units}, one refutes{more}", math.nan, 1.0, f"{units}, of {n}")


def holm(pvalues: Float64[np.ndarray, "tests"]) -> Float64[np.ndarray, "tests"]:
    """p-values adjusted for their family by Holm's step-down procedure; a NaN, a test without data, counts as 1."""
    # statsmodels takes most of a second to import, which the other commands of the study should not cost.
    require_package("statsmodels", "A correction by Holm", "./studies, in a clone of the repository")
    from statsmodels.stats.multitest import multipletests

    return np.asarray(multipletests(np.where(np.isnan(pvalues), 1.0, pvalues), method="holm")[1])


def significant(pvalues: Float64[np.ndarray, "tests"]) -> Bool[np.ndarray, "tests"]:
    """Which tests of a family Holm's procedure rejects."""
    return holm(pvalues) <= LEVEL
