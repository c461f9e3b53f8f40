"""The score of a model on a task with its standard error, and the paired difference of two scores."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import eq, ge, gt, le, lt
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64

from tlspectral.tables.html_summary import html_rows, html_summary
from tlspectral.tables.schema import columns

_RESAMPLES = 9_999  # all sign flips up to 13 sequences, a sample of them above


def _compared(compare: Callable[[float, float], bool]) -> Callable[[Any, Any], bool]:
    """Return the method of `_Number` that compares its value."""
    return lambda self, other: NotImplemented if (number := _number(other)) is None else compare(self.value, number)


class _Number:
    """A result that is used as its `value`: `float()`, `format`, and comparison with numbers and other results."""

    value: float
    se: float

    def __float__(self) -> float:
        return self.value

    def __format__(self, specification: str) -> str:
        return format(self.value, specification) if specification else str(self)

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.se:.4f}"

    def __abs__(self) -> float:
        return abs(self.value)

    def __neg__(self) -> float:
        return -self.value

    def __rsub__(self, other: Any) -> float:
        return NotImplemented if (number := _number(other)) is None else number - self.value

    __lt__, __le__, __gt__, __ge__, __eq__ = map(_compared, (lt, le, gt, ge, eq))

    def __hash__(self) -> int:
        return hash(self.value)


def _number(other: Any) -> float | None:
    """Return what a result is compared with or taken from, None if it is no number."""
    return float(other) if isinstance(other, _Number | int | float | np.integer | np.floating) else None


@dataclass(frozen=True, eq=False)
class Score(_Number):
    """Mean score of a model over the sequences of a task. It is used as a number, its `value`.

    The difference of two scores over the same sequences is the paired `Effect`; with a number it is a number.

    Attributes:
        per_sequence: score of each sequence.
        labels: the task's labels, a row per sequence, or None.
        sequences_sha256: hash of the tokens and scored positions; None where it is not known.
    """

    per_sequence: Float64[np.ndarray, "sequences"]
    labels: pd.DataFrame | None = field(default=None, repr=False)
    sequences_sha256: str | None = field(default=None, repr=False)

    @property
    def value(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Mean over sequences."""
        return float(self.per_sequence.mean())

    @property
    def se(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Standard error of the mean over sequences; NaN for a single one."""
        return standard_error(self.per_sequence)

    def table(self) -> pd.DataFrame:
        """Return a row per sequence: the task's labels, and `value`. `.groupby(label)["value"]` has means by label."""
        labels = pd.DataFrame(index=range(len(self.per_sequence))) if self.labels is None else self.labels
        return labels.reset_index(drop=True).assign(value=self.per_sequence)

    def __sub__(self, other: Any) -> "Effect | float":
        if isinstance(other, Score):
            return paired_effect(self, other)
        return NotImplemented if (number := _number(other)) is None else self.value - number

    def __repr__(self) -> str:
        return f"Score({self}, {len(self.per_sequence)} sequences)"

    def _repr_html_(self) -> str:
        rows = [("value", f"{self.value:.4g}"), ("se", f"{self.se:.4g}")]
        return html_rows("Score", [*rows, ("sequences", str(len(self.per_sequence)))])


@dataclass(frozen=True, eq=False)
class Effect(_Number):
    """A mean difference of scores over the same sequences. It is used as a number, its `value`.

    Attributes:
        value: mean difference, in the unit of the score; se: its standard error.
        pvalue: two-sided sign-flip test of no difference: exact up to 13 sequences, above from 9,999 seeded flips, and
            so no finer than 1e-4 there.
    """

    _repr_html_ = html_summary

    value: float
    se: float
    pvalue: float

    def __sub__(self, other: Any) -> float:
        return NotImplemented if (number := _number(other)) is None else self.value - number


def paired_effect(ablated: Score, intact: Score, *, seed: int = 0) -> Effect:
    """Effect of an ablation on a score: `ablated - intact`, sequence by sequence; `seed` is of the flips of signs.

    Raises ValueError for scores over different sequences, or over one.
    """
    if ablated.per_sequence.shape != intact.per_sequence.shape or len(intact.per_sequence) < 2:
        raise ValueError(
            f"a paired effect needs two scores over the same two or more sequences, found "
            f"{len(ablated.per_sequence)} and {len(intact.per_sequence)}"
        )
    if None not in (known := {ablated.sequences_sha256, intact.sequences_sha256}) and len(known) > 1:
        raise ValueError(
            "a paired effect needs two scores over the same sequences, and these are of other tokens: give both runs "
            "the same task, or compare float(score)"
        )
    difference = ablated.per_sequence - intact.per_sequence
    return Effect(float(difference.mean()), standard_error(difference), sign_flip_p(difference, seed))


def standard_error(per_sequence: Float64[np.ndarray, "sequences"]) -> float:
    """Standard error of a mean over sequences; NaN for a single one."""
    return float(scipy.stats.sem(per_sequence)) if len(per_sequence) > 1 else float("nan")


def sign_flip_p(difference: Float64[np.ndarray, "sequences"], seed: int) -> float:
    """Two-sided p of a mean difference under flips of its signs; NaN for a single sequence."""
    if len(difference) < 2:
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


CONTROL_COLUMNS = columns("""
    control_delta?    | of the metric | As delta, for the draws of the control, mean over them.
    control_delta_se? | of the metric | Standard error of control_delta, over draws and sequences; NaN for one draw.
    control_excess?   | of the metric | |delta| less the mean over draws of |control effect|.
    control_p?        | probability   | (1 + draws whose effect is as large as delta) / (1 + draws), in absolute values.
""")
"""Columns of effects beside those of a control."""


def beside_control(
    deltas: Float64[np.ndarray, "rows sequences"], controls: Float64[np.ndarray, "rows draws sequences"]
) -> dict[str, Float64[np.ndarray, "rows"]]:
    """Return the `CONTROL_COLUMNS` behind the first of effects, and of those of the draws on the same sequences."""
    drawn = controls.mean(2)
    n_draws = drawn.shape[1]
    over_sequences = np.array([standard_error(control) for control in controls.mean(1)])
    over_draws = drawn.std(1, ddof=1) / np.sqrt(n_draws) if n_draws > 1 else np.nan
    excess, pvalue = control_test(deltas.mean(1), drawn)
    error = np.hypot(over_sequences, over_draws)
    return {"control_delta_se": error, "control_excess": excess, "control_p": pvalue}


def control_test(
    delta: Float64[np.ndarray, "rows"], controls: Float64[np.ndarray, "rows draws"]
) -> tuple[Float64[np.ndarray, "rows"], Float64[np.ndarray, "rows"]]:
    """Compare the sizes of effects with those of their control effects: return `control_excess` and `control_p`.

    `control_excess` is |delta| less the mean of |control| over draws: positive where the effect is larger than that of
    a random draw on the mean, in either direction. `control_p` is the Monte-Carlo p of "the effect is one of the
    control's": (1 + draws with |control| >= |delta|) / (1 + draws). Small values say that the effect is larger. No p is
    below 1 / (1 + draws), so that .05 takes 19 draws. Where effect and draws are exchangeable, p is .05 or less in at
    most 5 % of the cases, whatever their distribution.

    >>> import numpy as np
    >>> excess, pvalue = control_test(np.array([-3.0]), np.array([[1.0, -2.0, 0.5, 4.0]]))
    >>> float(excess[0]), float(pvalue[0])
    (1.125, 0.4)

    Args:
        delta: effects, mean over sequences.
        controls: effects of the draws on the same sequences, mean over these.

    What it does not establish: that an effect differs from 0, which `paired_effect` tests, or from a control effect of
    its own size and the other sign.
    """
    size, drawn = np.abs(delta), np.abs(controls)
    as_large = (drawn >= size[..., None]).sum(-1)
    return size - drawn.mean(-1), (1 + as_large) / (1 + drawn.shape[-1])
