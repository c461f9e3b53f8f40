"""Questions about the history of a head: what forms first, when the median leaves its null, how the head ranks early.

All functions take a table of one row per `step`: `HeadHistory.track()`, or a published one.
"Fingerprint, Not Blueprint" (FP, section 9) asks them as Q1, Q2 and Q3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.tables.html_summary import html_summary
from tlspectral.tables.schema import Schema, columns, require

EVENTUAL_HEAD_RANK = Schema(
    "eventual_head_rank",
    columns("""
        step       | step  | Training step of the checkpoint.
        column     | label | Which percentile is looked at.
        percentile | share | Percentile of the eventual head within the model of that step.
        rank       | index | Rank of the eventual head; 1 has the largest value, ties have their mean rank.
        n_heads    | count | Heads of the model.
        top_share  | share | rank / n_heads: how often a random head ranks as high.
        chance     | share | 1 / n_heads: how often a random head has rank 1.
    """),
)


@dataclass(frozen=True)
class Crossing:
    """First crossing of a level by a series: between `after`, excluded, and `step`, included.

    Attributes:
        step: first step at or above the level; None if there is none.
        after: the step before it, where the series was below; None if the first step is above already.
        value: at `step`.
        lowest_later: least value from `step` on; below the level if the series fell back.
    """

    _repr_html_ = html_summary

    step: int | None
    after: int | None
    value: float | None
    lowest_later: float | None


@dataclass(frozen=True)
class FormationCrossing:
    """Crossings of a head's behaviour and of its phase percentile."""

    _repr_html_ = html_summary

    behaviour: Crossing
    phase: Crossing

    @property
    def lag(self) -> tuple[float, float]:
        """Steps by which the phase comes after the behaviour: no fewer than the first, fewer than the second number.

        Infinite where a crossing has no step before it; NaN where one of the two never comes.
        """
        if self.phase.step is None or self.behaviour.step is None:
            return math.nan, math.nan
        low = -math.inf if self.phase.after is None else float(self.phase.after - self.behaviour.step)
        high = math.inf if self.behaviour.after is None else float(self.phase.step - self.behaviour.after)
        return low, high

    @property
    def first(self) -> Literal["behaviour", "phase", "neither"] | None:
        """Which crosses first; `"neither"` if both cross between the same two steps, None if none does."""
        phase, behaviour = self.phase.step, self.behaviour.step
        if phase is None and behaviour is None:
            return None
        if phase == behaviour:
            return "neither"
        if phase is None or (behaviour is not None and behaviour < phase):
            return "behaviour"
        return "phase"


@dataclass(frozen=True)
class Departure:
    """Start of the stretch in which a median is outside its null until the end: after `after`, by `step`.

    Attributes:
        step: first step of the stretch outside that lasts to the end; None if the last step lies inside.
        after: the step before it; None if the median was never inside.
        side: `"below"` or `"above"` the null; None where step is.
        value, null: median at `step`, and the end of the null that it has passed.
    """

    _repr_html_ = html_summary

    step: int | None
    after: int | None
    side: Literal["below", "above"] | None
    value: float | None
    null: float | None


def formation_crossing(
    track: pd.DataFrame, *, behaviour: str = "prev", behaviour_level: float = 0.5, phase_level: float = 0.9
) -> FormationCrossing:
    """Q1: does a head's signature in the weights come before its behaviour, or after it?

    Args:
        track: one row per step, steps rising, of one head.
        behaviour: column of the head's detector score. The phase is `rope_imag_frac_pct`.
        behaviour_level, phase_level: levels that count as formed; report them with the answer.

    Returns:
        Both crossings with the interval between saved steps in which each lies, which of them is first, and the bounds
        of the lag. Two that lie between the same two steps cannot be ordered.

    Raises:
        ValueError: a column is missing or holds NaN, or there are several rows of a step.

    Source: "Fingerprint, Not Blueprint" (FP, section 9, Q1).

    What it does not establish: cause. The order depends on the levels too: a percentile is above .9 by chance in a
    tenth of all heads, another level may be crossed at another step, and `lowest_later` tells whether it held.
    """
    steps = _steps(track)
    return FormationCrossing(
        _crossing(steps, _values(track, behaviour), behaviour_level),
        _crossing(steps, _values(track, "rope_imag_frac_pct"), phase_level),
    )


def median_leaves_null(
    summary: pd.DataFrame,
    *,
    low: str | float = "D_head_null_low",
    high: str | float = "D_head_null_high",
    layer: int | None = None,
) -> Departure:
    """Q2: since when does the median over all heads, or a layer's, lie outside the spread of medians under the null?

    Args:
        summary: one row per step, steps rising: `HeadHistory.summary` or `HeadHistory.track()`.
        low, high: ends of the null's spread, as columns or, for a table without them, as numbers.
        layer: whose median is asked of (columns `_by_layer`); None: of all heads, which mixes early and late layers.

    Returns:
        The start of the stretch outside, on one side, that lasts to the last step.

    Raises:
        ValueError: a column is missing or holds NaN, or there are several rows of a step.

    Source: "Fingerprint, Not Blueprint" (FP, section 9, Q2).

    What it does not establish: when the first head left, since half of them can leave before a median moves; nor, for
    a matched null, that the singular values stayed as they were, because the null follows them.
    """
    steps, values = _steps(summary), _values(summary, "D_head_median", layer)
    ends = [
        np.full(len(steps), float(end)) if isinstance(end, int | float) else _values(summary, end, layer)
        for end in (low, high)
    ]
    sides = np.where(values < ends[0], -1, np.where(values > ends[1], 1, 0))
    last = int(sides[-1])
    if last == 0:
        return Departure(None, None, None, None, None)
    others = np.flatnonzero(sides != last)
    start = int(others[-1]) + 1 if len(others) else 0
    return Departure(
        step=steps[start],
        after=steps[start - 1] if start else None,
        side="above" if last > 0 else "below",
        value=float(values[start]),
        null=float(ends[1 if last > 0 else 0][start]),
    )


def half_of_fall(summary: pd.DataFrame, *, layer: int | None = None) -> Departure:
    """Q2: since when is half of the way of the median of D_head done, from its first value to its last?

    Args:
        summary: one row per step, steps rising: `HeadHistory.summary` or `HeadHistory.track()`.
        layer: whose median is asked of; None: of all heads.

    Returns:
        The start of the stretch beyond the middle that lasts to the last step; `median_leaves_null` gives the onset.

    Raises:
        ValueError: a column is missing or holds NaN, or there are several rows of a step.

    Source: "Fingerprint, Not Blueprint" (FP, section 9, "slow differential sculpting").

    What it does not establish: how much of the way chance makes; the last step decides what counts as the whole.
    """
    values = _values(summary, "D_head_median", layer)
    middle = float(values[0] + values[-1]) / 2
    low, high = (middle, math.inf) if values[-1] < values[0] else (-math.inf, middle)
    return median_leaves_null(summary, low=low, high=high, layer=layer)


def eventual_head_rank(
    track: pd.DataFrame, *, percentiles: Sequence[str] = ("prev_pct", "D_head_pct", "rope_imag_frac_pct")
) -> pd.DataFrame:
    """Q3: how does the eventual head rank among all heads at each step, and how often does a random one rank as high?

    Args:
        track: one row per step, steps rising, of the head that is known from the last step, with `n_heads`.
        percentiles: columns of percentiles within the model, `rankdata / n`.

    Returns:
        DataFrame, a step and column a row. Columns: `step, column, percentile, rank, n_heads, top_share, chance`.

    Raises:
        ValueError: a column is missing or holds NaN, or there are several rows of a step.

    Source: "Fingerprint, Not Blueprint" (FP, section 9, Q3).

    What it does not establish: a prediction, if the best of many steps and columns is picked afterwards: weights at
    neighbouring steps are all but equal, and a rank at initialisation stays until training moves it. The last step is
    no test of behaviour, by which the head was chosen.
    """
    steps, counted = _steps(track), _values(track, "n_heads")
    tables = []
    for column in percentiles:
        percentile = _values(track, column)
        rank = np.round((1.0 - percentile) * counted + 1.0, 6)  # rankdata is a multiple of 1/2
        tables.append(
            pd.DataFrame(
                {
                    "step": steps,
                    "column": column,
                    "percentile": percentile,
                    "rank": rank,
                    "n_heads": counted.astype(int),
                    "top_share": rank / counted,
                    "chance": 1.0 / counted,
                }
            )
        )
    return EVENTUAL_HEAD_RANK.frame(pd.concat(tables, ignore_index=True))


def _crossing(steps: list[int], values: Float64[np.ndarray, " steps"], level: float) -> Crossing:
    reached = np.flatnonzero(values >= level)
    if len(reached) == 0:
        return Crossing(None, None, None, None)
    first = int(reached[0])
    return Crossing(
        steps[first], steps[first - 1] if first else None, float(values[first]), float(values[first:].min())
    )


def _steps(table: pd.DataFrame) -> list[int]:
    """Return the steps of a table; they must rise."""
    if "step" in table and not pd.api.types.is_numeric_dtype(table["step"]):
        raise ValueError(
            f"column 'step' holds names such as {table['step'].iloc[0]!r}, which have no order in training: give "
            "head_history (step, checkpoint) pairs with whole numbers"
        )
    steps = [int(step) for step in _values(table, "step")]
    for before, after in pairwise(steps):
        if before == after:
            raise ValueError(f"the table has several rows of step {after}: take one head, as HeadHistory.track() does")
        if before > after:
            raise ValueError(f"step {after} follows step {before}: sort the table by 'step'")
    return steps


def _values(table: pd.DataFrame, column: str, layer: int | None = None) -> Float64[np.ndarray, " steps"]:
    """Return a column, or of its lists by layer the entry of a layer."""
    if layer is not None:
        column = f"{column}_by_layer"
    require(table, [column], "HeadHistory.track()")
    if layer is None:
        values = table[column].to_numpy(dtype=float)
    else:
        layers = min(map(len, table[column]), default=0)
        if not 0 <= layer < layers:
            raise ValueError(f"layer={layer}: the history has layers 0 to {layers - 1}")
        values = np.array([of_layers[layer] for of_layers in table[column]], dtype=float)
    if np.isnan(values).any():
        row = int(np.flatnonzero(np.isnan(values))[0])
        raise ValueError(
            f"column {column!r} is NaN in row {row}: was it measured (detectors), and does the model have it (rotary "
            "positions)?"
        )
    return values
