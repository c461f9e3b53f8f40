"""The overlap of picked heads with a circuit, against chance."""

from dataclasses import dataclass

import scipy.stats

from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class HypergeometricOverlap:
    """Overlap of two sets of heads.

    Attributes:
        statistic: heads in both sets.
        expected: mean number of heads in both sets if one of them is drawn at random.
        pvalue: probability of at least `statistic` heads in both.
        n: heads altogether.
    """

    _repr_html_ = html_summary

    statistic: int
    expected: float
    pvalue: float
    n: int


def hypergeometric_overlap(population: int, marked: int, drawn: int, overlap: int) -> HypergeometricOverlap:
    """Probability that a random set of heads overlaps a marked one as much ("Fingerprint, Not Blueprint", section 5).

    Args:
        population: heads altogether.
        marked: heads of the circuit.
        drawn: heads picked, without replacement.
        overlap: heads that are both.

    Raises:
        ValueError: counts that cannot be: negative ones, a set larger than the population, an overlap that two sets of
            these sizes cannot have.

    What it does not establish: anything, if the circuit was written down after the picked heads were seen. Where heads
    of a layer resemble each other it rejects in up to 7.9 % (docs/statistics.md).
    """
    if not (0 <= marked <= population and 0 <= drawn <= population):
        raise ValueError(f"{marked} marked and {drawn} drawn heads do not fit into a population of {population}")
    least, most = max(0, marked + drawn - population), min(marked, drawn)
    if not least <= overlap <= most:
        raise ValueError(
            f"{marked} and {drawn} of {population} heads have {least} to {most} in common, and cannot have {overlap}"
        )
    chance = scipy.stats.hypergeom(population, marked, drawn)
    expected = marked * drawn / population if population else 0.0
    return HypergeometricOverlap(overlap, expected, min(1.0, float(chance.sf(overlap - 1))), population)
