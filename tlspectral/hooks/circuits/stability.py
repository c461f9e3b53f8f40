"""Which edges another sample of pairs would choose: errors of estimates, bootstrap shares, overlaps of parts."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int

DRAWS = 1_000
"""Bootstrap samples of `selected`."""

SPLITS = 100
"""Splits into disjoint parts, over which overlaps are means."""

ENOUGH = 8
"""Distinct pairs below which `edge_effects` warns."""

_AT_ONCE = 50  # bootstrap samples
_MOST_UNITS = 1_000_000

UnitTerms = Float64[np.ndarray, "units edges"]


def estimate_errors(terms: UnitTerms, sizes: Int[np.ndarray, "units"]) -> Float64[np.ndarray, "edges"]:
    """Return the standard error of each estimate, the sum of its terms, over units; NaN for one unit.

    A term is what a unit of so many pairs adds to the mean over all pairs. As `tasks.metric_value.standard_error`.
    """
    n_units = len(terms)
    if n_units < 2:
        return np.full(terms.shape[1], np.nan)
    deviations = terms - (sizes / sizes.sum())[:, None] * terms.sum(0)
    return np.sqrt(n_units / (n_units - 1) * (deviations**2).sum(0))


def selected_share(terms: UnitTerms, n: int, seed: int) -> Float64[np.ndarray, "edges"]:
    """Return the share of bootstrap samples of the units in which an edge is among the n of largest estimate.

    An edge whose estimate is 0 in a sample is not chosen. NaN for one unit.
    """
    n_units, n_edges = terms.shape
    if n_units < 2:
        return np.full(n_edges, np.nan)
    rng, times = np.random.default_rng(seed), np.zeros(n_edges)
    for start in range(0, DRAWS, _AT_ONCE):
        drawn = rng.multinomial(n_units, np.full(n_units, 1 / n_units), size=min(_AT_ONCE, DRAWS - start))
        times += _largest(drawn @ terms, n).sum(0)
    return times / DRAWS


def overlaps(terms: UnitTerms, n: int, seed: int) -> dict[str, Any]:
    """Return how much the n largest edges of two disjoint parts of the units have in common, and what that suggests.

    `overlap_half` is the Jaccard index of the sets that two halves choose, mean over splits: the index of samples of
    half as many pairs. `overlap_quarter` is of two quarters. From both follow, by a power law of 1 less the index in
    the number of pairs, `overlap_extrapolated`, of two samples as large as this one, and `units_extrapolated`, how many
    distinct pairs (or blocks of them) would give .9. None where there are too few units, or more pairs do not agree
    better; no number of pairs above a million is given.
    """
    rng, n_units = np.random.default_rng(seed), len(terms)
    found: dict[str, Any] = {}
    for name, size in (("half", n_units // 2), ("quarter", n_units // 4)):
        found[f"overlap_{name}"] = _overlap(terms, n, size, rng) if size >= 2 else None
    half, quarter = found["overlap_half"], found["overlap_quarter"]
    found |= {"overlap_extrapolated": None, "units_extrapolated": None}
    if quarter is not None and quarter < half < 1.0:
        rate = np.log2((1 - quarter) / (1 - half)) / np.log2((n_units // 2) / (n_units // 4))
        found["overlap_extrapolated"] = float(1 - (1 - half) * (n_units // 2 / n_units) ** rate)
        units = np.log(n_units // 2) + np.log((1 - half) / 0.1) / rate
        if units < np.log(_MOST_UNITS):
            found["units_extrapolated"] = int(np.ceil(np.exp(units)))
    return found


def _overlap(terms: UnitTerms, n: int, size: int, rng: np.random.Generator) -> float:
    shares = []
    for _ in range(SPLITS):
        order = rng.permutation(len(terms))
        one, two = _largest(np.stack([terms[part].sum(0) for part in (order[:size], order[size : 2 * size])]), n)
        shares.append((one & two).sum() / max(1, (one | two).sum()))
    return float(np.mean(shares))


def _largest(estimates: Float64[np.ndarray, "samples edges"], n: int) -> Bool[np.ndarray, "samples edges"]:
    """Return which edges are among the n of largest size in each sample, and not 0."""
    size = np.abs(estimates)
    chosen = np.zeros(size.shape, dtype=bool)
    n = min(n, size.shape[1])
    np.put_along_axis(chosen, np.argpartition(-size, n - 1, axis=1)[:, :n], True, axis=1)
    return chosen & (size > 0)
