"""False discovery rates of a family of p-values."""

from dataclasses import dataclass

import numpy as np
import scipy.stats
from jaxtyping import Float64

from tlspectral.stats.values import Values, as_values
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True, eq=False)
class FalseDiscovery:
    """Adjusted p-values, in the order the p-values came in.

    Attributes:
        q: Benjamini and Hochberg's, [tests]: the smallest false discovery rate at which the test is rejected.
        n: tests in the family, those with a NaN not counted.
    """

    _repr_html_ = html_summary

    q: Float64[np.ndarray, "tests"]
    n: int


def benjamini_hochberg(pvalues: Values) -> FalseDiscovery:
    """Benjamini and Hochberg's false discovery rate over one family of tests ("Fingerprint, Not Blueprint", Table 4).

    Args:
        pvalues: [tests], from 0 to 1. A NaN is no test: its q is NaN and it does not count in the family.

    Returns:
        `FalseDiscovery`.

    Raises:
        ValueError: not one-dimensional, or a p-value outside [0, 1].

    What it does not establish: control under negative dependence between the tests, or that the family was chosen
    before the p-values were seen.
    """
    given = as_values(pvalues, "pvalues")
    tested = ~np.isnan(given)
    p = given[tested]
    if ((p < 0) | (p > 1)).any():
        raise ValueError(f"p-values lie between 0 and 1, found {p[(p < 0) | (p > 1)][0]}")
    q = np.full(len(given), np.nan)
    if len(p):
        q[tested] = scipy.stats.false_discovery_control(p)
    return FalseDiscovery(q, len(p))
