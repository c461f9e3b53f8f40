"""The value of a model on a task with its standard error, and the paired difference of two values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64, Int

from tlspectral.tables.html_summary import html_rows, html_summary

_RESAMPLES = 9_999  # all sign flips up to 13 sequences, a sample of them above


@dataclass(frozen=True, eq=False, repr=False)
class MetricValue(float):
    """Mean value of a model over the sequences of a task, a number.

    The difference of two values over the same sequences is the paired `Effect`; with a number it is a number.

    Attributes:
        per_sequence: value of each sequence.
        labels: the task's labels, a row per sequence, or None.
        sequences_sha256: hash of the tokens and predicted positions; None where it is not known.
        distinct: the number of the distinct row of each sequence; None where all differ.
        texts: text of each sequence: the prompt as it was given, or what the tokenizer makes of its ids, special tokens
            included; of a model without a tokenizer the ids. None where it is not known.
    """

    per_sequence: Float64[np.ndarray, "sequences"]
    labels: pd.DataFrame | None = None
    sequences_sha256: str | None = None
    distinct: Int[np.ndarray, "sequences"] | None = None
    texts: tuple[str, ...] | None = None

    def __new__(cls, per_sequence: Float64[np.ndarray, "sequences"], *_: Any, **__: Any) -> MetricValue:
        """Make the number, the mean over sequences."""
        return super().__new__(cls, per_sequence.mean())

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.per_sequence,)

    @property
    def value(self) -> float:
        """Mean over sequences."""
        return float(self)

    @property
    def se(self) -> float:
        """Standard error of the mean over sequences, equal ones counted once; NaN for a single one."""
        return standard_error(self.per_sequence, self.distinct)

    def table(self) -> pd.DataFrame:
        """Return a row per sequence: its `text`, the task's labels, and `value`.

        `.groupby(label)["value"]` has means by label. A label that is called `text` takes the place of the text.
        """
        labels = pd.DataFrame(index=range(len(self.per_sequence))) if self.labels is None else self.labels
        table = labels.reset_index(drop=True)
        if self.texts is not None and "text" not in table:
            table.insert(0, "text", self.texts)
        return table.assign(value=self.per_sequence)

    def __sub__(self, other: Any) -> Effect | float:
        return paired_effect(self, other) if isinstance(other, MetricValue) else super().__sub__(other)

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.se:.4f}"

    def __repr__(self) -> str:
        return f"MetricValue({self}, {len(self.per_sequence)} sequences)"

    def _repr_html_(self) -> str:
        rows = [("value", f"{self.value:.4g}"), ("se", f"{self.se:.4g}")]
        return html_rows("MetricValue", [*rows, ("sequences", str(len(self.per_sequence)))])


@dataclass(frozen=True, eq=False)
class Effect(float):
    """A mean difference of values over the same sequences, a number.

    Attributes:
        value: mean difference, in the unit of the metric; se: its standard error.
        pvalue: two-sided sign-flip test of no difference: exact up to 13 sequences, above from 9,999 seeded flips.
            Equal sequences are flipped together.
        floor: the smallest pvalue that any signs of these differences could have had: 2 / 2^n for n up to 13 that are
            not 0, and 2e-4 for many.
    """

    _repr_html_ = html_summary

    value: float
    se: float
    pvalue: float
    floor: float = float("nan")

    def __new__(cls, value: float, *_: Any, **__: Any) -> Effect:
        """Make the number, `value`."""
        return super().__new__(cls, value)

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.se:.4f}"


def paired_effect(ablated: MetricValue, intact: MetricValue, *, seed: int = 0) -> Effect:
    """Return the effect of an ablation on a value, `ablated - intact` by sequence; `seed` is of the flips of signs.

    Raises ValueError for values over different sequences, or over one.
    """
    if ablated.per_sequence.shape != intact.per_sequence.shape or len(intact.per_sequence) < 2:
        raise ValueError(
            f"a paired effect needs two values over the same two or more sequences, found "
            f"{len(ablated.per_sequence)} and {len(intact.per_sequence)}"
        )
    if None not in (known := {ablated.sequences_sha256, intact.sequences_sha256}) and len(known) > 1:
        raise ValueError(
            "a paired effect needs two values over the same sequences, and these are of other tokens: give both runs "
            "the same task, or compare float(value)"
        )
    difference = ablated.per_sequence - intact.per_sequence
    distinct = intact.distinct
    return Effect(
        float(difference.mean()),
        standard_error(difference, distinct),
        sign_flip_p(difference, seed, distinct),
        sign_flip_floor(difference, seed, distinct),
    )


def row_sums(
    per_sequence: Float64[np.ndarray, "*rows sequences"], distinct: Int[np.ndarray, "sequences"] | None
) -> Float64[np.ndarray, "*rows distinct"]:
    """Return the sum over equal sequences for each distinct row; the values themselves where all differ."""
    if distinct is None:
        return per_sequence
    return per_sequence @ np.eye(distinct.max() + 1)[distinct]


def values_of_rows(
    per_sequence: Float64[np.ndarray, "sequences"], distinct: Int[np.ndarray, "sequences"] | None
) -> Float64[np.ndarray, "distinct"]:
    """Return a value for each distinct row; their mean and its standard error are the same as over the sequences.

    Equal sequences are a cluster of a fixed size, and its value is the mean of all plus G / n times the sum of their
    deviations from it, with G clusters of n sequences.
    """
    if distinct is None:
        return per_sequence
    mean, sums = per_sequence.mean(), row_sums(per_sequence - per_sequence.mean(), distinct)
    return mean + sums * len(sums) / len(per_sequence)


def standard_error(
    per_sequence: Float64[np.ndarray, "sequences"], distinct: Int[np.ndarray, "sequences"] | None = None
) -> float:
    """Return the standard error of the mean over sequences; those with one number in `distinct` are one observation.

    With G of them in n sequences it is `sqrt(G / (G - 1) sum_g (sum of the deviations from the mean in g)^2) / n`, the
    usual one where all differ; NaN for one.
    """
    values = values_of_rows(per_sequence, distinct)
    return float(scipy.stats.sem(values)) if len(values) > 1 else float("nan")


def sign_flip_p(
    difference: Float64[np.ndarray, "sequences"], seed: int, distinct: Int[np.ndarray, "sequences"] | None = None
) -> float:
    """Return the two-sided p of a mean difference under flips of its signs, equal sequences together.

    NaN for one, and where a difference is not finite.
    """
    difference = row_sums(difference, distinct)
    if len(difference) < 2 or not np.isfinite(difference).all():
        return float("nan")
    test = scipy.stats.permutation_test(
        (difference,),
        lambda values, axis: values.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        random_state=seed,  # pyright: ignore  (the name in every scipy since 1.11)
    )
    return float(test.pvalue)


def sign_flip_floor(
    difference: Float64[np.ndarray, "sequences"], seed: int, distinct: Int[np.ndarray, "sequences"] | None = None
) -> float:
    """Return the smallest `sign_flip_p` that differences of these sizes have with any signs; NaN where that is.

    With equal signs no flip gives a larger mean. Flips of differences that are 0 are ties. With n that are not 0 the
    floor is 2 / 2^n where all flips are listed. Where 9,999 are drawn, it is 2 / 10,000 for each time that they leave
    all signs as they are, and once more.

    >>> import numpy as np
    >>> sign_flip_floor(np.array([1.0, -2.0, 3.0, 4.0, 5.0, 6.0]), 0), sign_flip_floor(np.array([1.0, 0.0, 2.0]), 0)
    (0.03125, 0.5)
    """
    sizes = np.abs(row_sums(difference, distinct))
    if not np.isfinite(sizes).all():
        return float("nan")
    # The test takes means as equal that differ by 100 eps.
    counted = 2 * sizes > 100 * np.finfo(np.float64).eps * sizes.sum()
    return _floor_of_flips(tuple(counted.tolist()), seed)


@cache
def _floor_of_flips(counted: tuple[bool, ...], seed: int) -> float:
    """Return the smallest p of differences of which some count and the others are 0."""
    return sign_flip_p(np.array(counted, dtype=np.float64), seed)
