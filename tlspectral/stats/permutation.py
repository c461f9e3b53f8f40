"""Exact permutation tests with one value per model."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool

from tlspectral.errors.settings import checked_settings
from tlspectral.stats.values import Values, as_values, require_known
from tlspectral.tables.html_summary import html_summary

Alternative = Literal["two-sided", "less", "greater"]
"""Side of the test: which sign of a difference counts as extreme."""

_MOST_LABELINGS = 200_000


@dataclass(frozen=True)
class ModelPermutation:
    """An exact permutation test of two groups of models; `tls.stats.model_permutation_test` returns it.

        test = tls.stats.model_permutation_test([0.5, 0.6, 0.7], [0.1, 0.2, 0.3])  # one number per model
        test.statistic, test.pvalue

    Attributes:
        statistic: mean of x minus mean of y.
        pvalue: share of all labelings (ways to choose which models form group x), the observed one included, whose
            statistic is at least as extreme: as large in absolute value (two-sided), as low ("less"), as high
            ("greater").
        floor: the smallest p-value that any labeling of these values could have.
        gap: lowest value of the upper group minus highest value of the lower group; the upper group is x or y,
            whichever gives the larger gap.
        separated: True if the gap is above 0, so that the groups do not overlap.
        n_permutations: number of labelings, `C(n, n_x)`.
        n: number of models.
        alternative: "two-sided", "less" or "greater", for the mean of x minus the mean of y.
        method: how the p-value was computed, in words.
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


@checked_settings
def model_permutation_test(x: Values, y: Values, *, alternative: Alternative = "two-sided") -> ModelPermutation:
    """Test exactly whether two groups of models differ in a number, with one value per model.

    >>> import tlspectral as tls
    >>> test = tls.stats.model_permutation_test([0.5, 0.6, 0.7], [0.1, 0.2, 0.3])
    >>> round(test.statistic, 2), test.pvalue, test.floor
    (0.4, 0.1, 0.1)

    Use it to compare kinds of models: heads of one model are not independent, models are ("Fingerprint, Not Blueprint",
    section 6). A labeling chooses which of the models form group x. The p-value is the share of all labelings whose
    difference of means is at least as extreme as the observed difference.

    Args:
        x, y: one value per model of each group, [n_x] and [n_y].
        alternative: "two-sided" (default), "less" or "greater", for the mean of x minus the mean of y. With groups of
            equal size the smallest p of a two-sided test is at least twice the smallest p of a one-sided test.

    Returns:
        `ModelPermutation` with `.statistic` (mean of x minus mean of y, in the unit of the values), `.pvalue`, `.floor`
            (the smallest p-value that these values allow), `.gap` between the groups' nearest values and `.separated`
            (True if they do not overlap), `.n_permutations` and `.n` (models).

    Raises:
        ValueError: a group is empty, a value is not finite, there are more than 200,000 labelings, or the alternative
            is unknown.

    Not established: that the groups differ for the reason in their names. Models with the same positional scheme share
    more than that scheme. With few models even separated groups have a p-value near the floor.
    """
    require_known("alternative", alternative, get_args(Alternative))
    groups = as_values(x, "x"), as_values(y, "y")
    for name, group in zip(("x", "y"), groups, strict=True):
        if not len(group):
            raise ValueError(f"group {name} is empty: give one value for each of its models")
        if not np.isfinite(group).all():
            raise ValueError(
                f"group {name} has a value that is not finite: leave that model out of {name}, and report that you did"
            )
    values, n_x = np.concatenate(groups), len(groups[0])
    in_x = _labelings(len(values), n_x)
    sum_x, sum_y = np.where(in_x, values, 0).sum(1), np.where(in_x, 0, values).sum(1)
    differences = sum_x / n_x - sum_y / (len(values) - n_x)
    extreme = {"two-sided": np.abs(differences), "less": -differences, "greater": differences}[alternative]
    # scipy.stats.permutation_test loses tied labelings if the observed difference is 0, so the tolerance is absolute.
    # Sums of one labeling in another order differ by rounding; different labelings differ by far more.
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
    """Return a boolean row for each choice of n_x of n models, True for chosen models; row 0 chooses the first n_x.

    Raises ValueError for more than 200,000 choices.
    """
    count = math.comb(n, n_x)
    if count > _MOST_LABELINGS:
        raise ValueError(
            f"{n_x} of {n} models can be chosen in {count} ways, more than {_MOST_LABELINGS}: test fewer models, or "
            "sample labelings with scipy.stats.permutation_test"
        )
    in_x = np.zeros((count, n), dtype=bool)
    chosen = np.array(list(itertools.combinations(range(n), n_x)))
    np.put_along_axis(in_x, chosen, True, axis=1)
    return in_x
