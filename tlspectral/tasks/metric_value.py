"""`MetricValue`: the value of a model on a task, with its standard error. `Effect`: the difference of two values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64, Int

from tlspectral.errors import not_a
from tlspectral.errors.settings import checked_settings
from tlspectral.tables.html_summary import html_rows, html_summary

_RESAMPLES = 9_999  # all sign flips up to 13 sequences, a sample of them above


@dataclass(frozen=True, eq=False, repr=False)
class MetricValue(float):
    """The value of a model on a task: a number, the mean of the metric over sequences, in the metric's unit.

    >>> import tlspectral as tls
    >>> value = tls.evaluate(tls.load_model("tiny-rope"), tls.tasks.induction(n_sequences=8))
    >>> value
    MetricValue(0.1095 ± 0.0019, 8 sequences)
    >>> round(value.value, 2), round(value.se, 4), len(value.per_sequence)
    (0.11, 0.0019, 8)

    `tls.evaluate(model, task)` returns it for a model and a `tls.Task`. `a - b` of two values over the same sequences
    is a paired `Effect`, and raises ValueError for other sequences. The difference from a number is a number.

    Attributes:
        per_sequence: value of each sequence [sequences].
        labels: the task's labels, a row per sequence, or None.
        sequences_sha256: hash of the tokens and predicted positions; None if unknown.
        distinct: an integer per sequence [sequences]; equal sequences have the same integer. None if all differ.
        texts: text of each sequence: the given prompt, or the decoded ids with special tokens. Without a tokenizer the
            ids. None if unknown.

    Not established: anything about prompts of another kind. `.se` counts only variation between these sequences.
    """

    per_sequence: Float64[np.ndarray, "sequences"]
    labels: pd.DataFrame | None = None
    sequences_sha256: str | None = None
    distinct: Int[np.ndarray, "sequences"] | None = None
    texts: tuple[str, ...] | None = None

    def __new__(cls, per_sequence: Float64[np.ndarray, "sequences"], *_: Any, **__: Any) -> MetricValue:
        """Return the mean over sequences as a float of this class.

        `per_sequence`: the values whose mean is taken. Further arguments are fields, not used here.
        """
        return super().__new__(cls, per_sequence.mean())

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.per_sequence,)

    @property
    def value(self) -> float:
        """Mean over sequences, in the unit of the metric."""
        return float(self)

    @property
    def se(self) -> float:
        """Standard error of the mean over sequences. Equal sequences count as one; NaN if all are equal."""
        return standard_error(self.per_sequence, self.distinct)

    def table(self) -> pd.DataFrame:
        """Return a DataFrame with a row per sequence and the columns `text` (the prompt, if known), one per label of
        the task, and `value` (the metric).

        `value.table().groupby("condition")["value"].mean()` gives the means by the label `condition`. A label with the
        name `text` replaces the text.
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
        """Return HTML for notebooks: a table of value, standard error and number of sequences."""
        rows = [("value", f"{self.value:.4g}"), ("se", f"{self.se:.4g}")]
        return html_rows("MetricValue", [*rows, ("sequences", str(len(self.per_sequence)))])


@dataclass(frozen=True, eq=False)
class Effect(float):
    """The mean difference of two values over the same sequences, in the metric's unit: a number with error and p-value.

        intact = tls.evaluate(model, task)
        with tls.ablate(model, "L0H3", "output"):  # the head, and the part of it that is removed
            effect = tls.evaluate(model, task) - intact
        effect.value, effect.se, effect.pvalue

    `tls.tasks.paired_effect(ablated, intact)` returns the same for two `MetricValue`s. The difference of values on
    other sequences raises ValueError.

    Attributes:
        value: mean difference, in the unit of the metric.
        se: standard error of the mean difference over sequences.
        pvalue: two-sided p of a sign-flip test: share of sign flips that give a mean difference at least as large in
            absolute value. It uses all flips up to 13 sequences, above that 9,999 seeded flips. Equal sequences are
            flipped together.
        floor: the smallest pvalue that differences of these sizes can have: 2 / 2^n for n differences other than 0 (n
            up to 13), about 2e-4 for more.

    Not established: that the ablated part matters more than a random part of its size; a control tests this. The
    p-value is not corrected for the number of heads.
    """

    _repr_html_ = html_summary

    value: float
    se: float
    pvalue: float
    floor: float = float("nan")

    def __new__(cls, value: float, *_: Any, **__: Any) -> Effect:
        """Return `value` (the mean difference) as a float of this class. Further arguments are fields, not used
        here.
        """
        return super().__new__(cls, value)

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.se:.4f}"


@checked_settings
def paired_effect(ablated: MetricValue, intact: MetricValue, *, seed: int = 0) -> Effect:
    """Return the paired effect `ablated - intact`: mean difference over sequences, standard error and p-value.

    >>> import tlspectral as tls
    >>> model, task = tls.load_model("tiny-rope"), tls.tasks.induction(n_sequences=8)
    >>> with tls.ablate(model, "L0H3", "output"):
    ...     ablated = tls.evaluate(model, task)
    >>> effect = tls.tasks.paired_effect(ablated, tls.evaluate(model, task))
    >>> print(effect, effect.pvalue)
    3.1513 ± 0.0348 0.0078125

    `ablated - intact` does the same with seed 0.

    Args:
        ablated, intact: two results of `tls.evaluate` on the same task.
        seed: seed of the random sign flips. Default: 0.

    Returns:
        An `Effect`, which is a number in the unit of the metric, with `.value`, `.se`, `.pvalue` (two-sided sign-flip
            test over sequences) and `.floor` (the smallest pvalue that these differences can have).

    Raises:
        ValueError: the values belong to different sequences, or to only one sequence.

    Not established: that the ablated part matters more than a random part of its size; compare with a control.
    """
    for value in (ablated, intact):
        if not isinstance(value, MetricValue):
            raise TypeError(f"{not_a(value, 'the value of a task')}: give two results of tls.evaluate(model, task)")
    if ablated.per_sequence.shape != intact.per_sequence.shape or len(intact.per_sequence) < 2:
        raise ValueError(
            f"a paired effect needs two values over the same two or more sequences, found "
            f"{len(ablated.per_sequence)} and {len(intact.per_sequence)}: evaluate the same task both times"
        )
    if None not in (known := {ablated.sequences_sha256, intact.sequences_sha256}) and len(known) > 1:
        raise ValueError(
            "a paired effect needs two values over the same sequences, and these two values have other tokens: "
            "evaluate the same task both times, or subtract float(value)"
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
    """Return sums of `per_sequence` over equal sequences, [..., distinct]: one sum per distinct sequence.

    `distinct`: an integer per sequence, the same for equal sequences. None: all differ, and the values are returned.
    """
    if distinct is None:
        return per_sequence
    return per_sequence @ np.eye(distinct.max() + 1)[distinct]


def values_of_rows(
    per_sequence: Float64[np.ndarray, "sequences"], distinct: Int[np.ndarray, "sequences"] | None
) -> Float64[np.ndarray, "distinct"]:
    """Return a value per distinct sequence, such that their mean and standard error are those clustered by sequence.

    `per_sequence`: value of each sequence. `distinct`: an integer per sequence, the same for equal sequences; None if
    all differ. With G distinct of n sequences, a value is the overall mean plus G / n times the sum of the deviations
    of the equal sequences from this mean.
    """
    if distinct is None:
        return per_sequence
    mean, sums = per_sequence.mean(), row_sums(per_sequence - per_sequence.mean(), distinct)
    return mean + sums * len(sums) / len(per_sequence)


def standard_error(
    per_sequence: Float64[np.ndarray, "sequences"], distinct: Int[np.ndarray, "sequences"] | None = None
) -> float:
    """Return the standard error of the mean over sequences, where equal sequences are one observation.

    `per_sequence`: value of each sequence. `distinct`: an integer per sequence, the same for equal sequences; None if
    all differ. With G distinct of n sequences the result is `sqrt(G / (G - 1) sum_g d_g^2) / n`, where d_g is the sum
    of the deviations from the mean in group g. This is the usual standard error if all differ, and NaN for G = 1.
    """
    values = values_of_rows(per_sequence, distinct)
    return float(scipy.stats.sem(values)) if len(values) > 1 else float("nan")


def sign_flip_p(
    difference: Float64[np.ndarray, "sequences"], seed: int, distinct: Int[np.ndarray, "sequences"] | None = None
) -> float:
    """Return the two-sided p of a sign-flip test: the share of sign flips with a mean at least as large in size.

    `difference`: paired differences, one per sequence. `seed`: of 9,999 random flips; up to 13 sequences all flips are
    used. `distinct`: an integer per sequence, the same for equal sequences, which are flipped together; None if all
    differ. NaN for one distinct sequence, or if a difference is not finite.
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
    """Return the smallest `sign_flip_p` that differences of these sizes can have, whatever their signs.

    It is the p of differences with equal signs, because no flip then gives a larger mean. With n differences other than
    0 it is 2 / 2^n if all flips are listed (up to 13 sequences). With 9,999 random flips it is 2 (1 + k) / 10,000, if k
    of them change no sign. `difference`: paired differences, one per sequence. `seed`: of the random flips. `distinct`:
    an integer per sequence, the same for equal sequences; None if all differ. NaN where `sign_flip_p` is NaN.

    >>> import numpy as np
    >>> sign_flip_floor(np.array([1.0, -2.0, 3.0, 4.0, 5.0, 6.0]), 0)
    0.03125
    >>> sign_flip_floor(np.array([1.0, 0.0, 2.0]), 0)
    0.5
    """
    sizes = np.abs(row_sums(difference, distinct))
    if not np.isfinite(sizes).all():
        return float("nan")
    # The test takes means as equal that differ by 100 eps.
    counted = 2 * sizes > 100 * np.finfo(np.float64).eps * sizes.sum()
    return _floor_of_flips(tuple(counted.tolist()), seed)


@cache
def _floor_of_flips(counted: tuple[bool, ...], seed: int) -> float:
    """Return `sign_flip_p` of differences that are 1 where `counted` is True and 0 elsewhere. `seed`: of the random
    flips for more than 13 differences.
    """
    return sign_flip_p(np.array(counted, dtype=np.float64), seed)
