"""How far the chosen edges depend on the sample of pairs: standard errors, bootstrap shares, overlaps of halves.

A unit is a distinct pair of prompts, or a block of pairs. `terms` [units, edges] has the share of each unit in the
estimate of each edge; their sum over units is the estimate.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float64, Int

DRAWS = 1_000
"""Number of bootstrap samples for the column `selected`."""

SPLITS = 100
"""Number of random splits of the pairs into disjoint parts; overlaps are means over these splits."""

ENOUGH = 8
"""`edge_effects` warns if there are fewer distinct pairs than this."""

_AT_ONCE = 50  # bootstrap samples that are computed together
_MOST_UNITS = 1_000_000  # a larger extrapolated number of units is not reported

UnitTerms = Float64[np.ndarray, "units edges"]


def estimate_errors(terms: UnitTerms, sizes: Int[np.ndarray, "units"]) -> Float64[np.ndarray, "edges"]:
    """Return the standard error of each edge's estimate over units (pairs, or blocks of pairs); NaN for one unit.

    `terms` [units, edges] has the share of each unit in the estimate, which is their sum. `sizes` has the number of
    pairs in each unit.
    """
    # The same formula as `tasks.metric_value.standard_error`.
    n_units = len(terms)
    if n_units < 2:
        return np.full(terms.shape[1], np.nan)
    deviations = terms - (sizes / sizes.sum())[:, None] * terms.sum(0)
    return np.sqrt(n_units / (n_units - 1) * (deviations**2).sum(0))


def selected_share(terms: UnitTerms, n: int, seed: int) -> Float64[np.ndarray, "edges"]:
    """Return for each edge the share of bootstrap samples in which it is among the n edges of largest |estimate|.

    1,000 samples are drawn over units (pairs or blocks of pairs), with `seed`. `terms` [units, edges] has the share of
    each unit in the estimates. An estimate of 0 is never chosen. NaN for one unit.
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
    """Return how far two disjoint parts of the pairs choose the same n largest edges, as a dict of four attrs.

    `terms` [units, edges] has the share of each unit (pair, or block of pairs) in the estimate of each edge; `seed`
    draws the parts. `overlap_half` and `overlap_quarter` are the mean Jaccard index of the edges that two halves, or
    two quarters, of the units choose. `overlap_extrapolated` is the index for two samples as large as this one, by a
    power law in the number of units. `units_extrapolated` is the number of units for an index of .9. A value is None
    for too few units, if halves do not agree better than quarters, or for more than a million units.
    """
    rng, n_units = np.random.default_rng(seed), len(terms)
    attrs: dict[str, Any] = {}
    for name, size in (("half", n_units // 2), ("quarter", n_units // 4)):
        attrs[f"overlap_{name}"] = _overlap(terms, n, size, rng) if size >= 2 else None
    half, quarter = attrs["overlap_half"], attrs["overlap_quarter"]
    attrs |= {"overlap_extrapolated": None, "units_extrapolated": None}
    if quarter is not None and quarter < half < 1.0:
        # 1 - index falls as a power of the number of units.
        rate = np.log2((1 - quarter) / (1 - half)) / np.log2((n_units // 2) / (n_units // 4))
        attrs["overlap_extrapolated"] = float(1 - (1 - half) * (n_units // 2 / n_units) ** rate)
        units = np.log(n_units // 2) + np.log((1 - half) / 0.1) / rate
        if units < np.log(_MOST_UNITS):
            attrs["units_extrapolated"] = int(np.ceil(np.exp(units)))
    return attrs


def _overlap(terms: UnitTerms, n: int, size: int, rng: np.random.Generator) -> float:
    """Return the mean Jaccard index of the n largest edges in two disjoint random parts with `size` units each.

    `terms` [units, edges] has the share of each unit (pair, or block of pairs) in the estimates. The mean is over 100
    random splits, drawn with `rng`.
    """
    shares = []
    for _ in range(SPLITS):
        order = rng.permutation(len(terms))
        first, second = _largest(np.stack([terms[part].sum(0) for part in (order[:size], order[size : 2 * size])]), n)
        shares.append((first & second).sum() / max(1, (first | second).sum()))
    return float(np.mean(shares))


def _largest(estimates: Float64[np.ndarray, "samples edges"], n: int) -> Bool[np.ndarray, "samples edges"]:
    """Return a mask, True for the n edges of largest |estimate| in each sample, without estimates of 0."""
    size = np.abs(estimates)
    chosen = np.zeros(size.shape, dtype=bool)
    n = min(n, size.shape[1])
    np.put_along_axis(chosen, np.argpartition(-size, n - 1, axis=1)[:, :n], True, axis=1)
    return chosen & (size > 0)
