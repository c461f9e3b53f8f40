"""Exact permutation tests with models as units."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool

from tlspectral.stats.values import Values, as_values, require_known
from tlspectral.tables.html_summary import html_summary

Alternative = Literal["two-sided", "less", "greater"]
"""On which side of 0 a correlation counts."""

_MOST_LABELINGS = 200_000


@dataclass(frozen=True)
class ModelPermutation:
    """An exact permutation test of two groups of models.

    Attributes:
        statistic: mean of x less mean of y.
        pvalue: share of all labelings, the observed one included, whose statistic is at least as extreme: as large in
            absolute value (two-sided), as low (`"less"`), as high (`"greater"`).
        floor: the smallest p-value that any labeling of these values could have had.
        gap: lowest value of the upper group less highest value of the lower one; the groups are named upper and lower
            so that it is as large as it can be.
        separated: the gap is above 0: no value of one group reaches the other.
        n_permutations: labelings, `C(n, n_x)`.
        n: models.
        alternative: `"two-sided"`, `"less"` or `"greater"`, of x.
        method: how the p-value came about.
    """

    _repr_html_ = html_summary

    statistic: float
    pvalue: float
    floor: float
    gap: float
    separated: bool
    n_permutations: int
    n: int
    alternative: str
    method: str


def model_permutation_test(x: Values, y: Values, *, alternative: Alternative = "two-sided") -> ModelPermutation:
    """Run an exact permutation test with one value per model ("Fingerprint, Not Blueprint", section 6).

    Args:
        x, y: one value per model of each group, [n_x] and [n_y].
        alternative: of the difference of means, x less y. A two-sided test has at least twice the floor of a one-sided
            one where the groups are equally large.

    Returns:
        `ModelPermutation`. `scipy.stats.permutation_test` gives no floor, and allows for rounding in proportion to the
        observed difference alone: where that is 0, it loses labelings that are tied with it.

    Raises:
        ValueError: an empty group, a value that is not finite (no model is left out without notice), more than 200,000
            labelings, or an unknown alternative.

    What it does not establish: that the groups differ for the reason they were named after: models that share a
    positional scheme share more than that. With few models even perfect separation has a p-value near the floor.
    """
    require_known("alternative", alternative, get_args(Alternative))
    groups = as_values(x, "x"), as_values(y, "y")
    for name, group in zip(("x", "y"), groups, strict=True):
        if not len(group):
            raise ValueError(f"group {name} holds no model")
        if not np.isfinite(group).all():
            raise ValueError(f"group {name} holds a value that is not finite: leave that model out by hand, and say so")
    values, n_x = np.concatenate(groups), len(groups[0])
    in_x = _labelings(len(values), n_x)
    sum_x, sum_y = np.where(in_x, values, 0).sum(1), np.where(in_x, 0, values).sum(1)
    differences = sum_x / n_x - sum_y / (len(values) - n_x)
    extreme = {"two-sided": np.abs(differences), "less": -differences, "greater": differences}[alternative]
    # The same labeling summed in another order differs by rounding; values differ by far more.
    rounding = 1e-12 * max(float(np.abs(values - values.mean()).max()), 1e-300)
    x_values, y_values = groups
    gap = float(max(x_values.min() - y_values.max(), y_values.min() - x_values.max()))
    return ModelPermutation(
        statistic=float(differences[0]),
        pvalue=float((extreme >= extreme[0] - rounding).mean()),
        floor=float((extreme >= extreme.max() - rounding).mean()),
        gap=gap,
        separated=gap > 0,
        n_permutations=len(in_x),
        n=len(values),
        alternative=alternative,
        method=f"difference of means, exact over {len(in_x)} labelings",
    )


def _labelings(n: int, n_x: int) -> Bool[np.ndarray, "labelings n"]:
    """List every choice of n_x of n models for x; the first one has the first n_x models."""
    count = math.comb(n, n_x)
    if count > _MOST_LABELINGS:
        raise ValueError(f"{n_x} of {n} models can be chosen in {count} ways, more than {_MOST_LABELINGS}")
    in_x = np.zeros((count, n), dtype=bool)
    chosen = np.array(list(itertools.combinations(range(n), n_x)))
    np.put_along_axis(in_x, chosen, True, axis=1)
    return in_x
