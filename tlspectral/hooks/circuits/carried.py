"""The share of a gap that a circuit or a set of heads carries: its interval over pairs, and a gap that is too small."""

import numpy as np
import scipy.stats
from jaxtyping import Float64

from tlspectral.models.hooking.exclusive import naming_open_contexts
from tlspectral.stats.ratio import ratio_interval, unseen_share
from tlspectral.tables.printed import short_number
from tlspectral.tasks.metric_value import row_sums, standard_error
from tlspectral.tasks.task_sequences import TaskSequences

FEWEST = 8
"""Distinct pairs below which there is no interval."""

Values = Float64[np.ndarray, "pairs"]


def carried_interval(sequences: TaskSequences, value: Values, whole: Values, none: Values) -> dict[str, float]:
    """Return a dict with the interval of mean(value - none) / mean(whole - none) over pairs.

    `value`, `whole` and `none` are the metric of each pair in the circuit, in the whole model and in no circuit. Keys:
    `low` and `high` (95 %, Fieller; NaN below 8 distinct pairs or if pairs hardly differ), `unseen` (share of pairs
    that may behave unlike every drawn pair) and `worst` (the lower end if unseen pairs carried nothing).
    """
    # Equal pairs count as one observation: the interval is over their sums.
    carried, of_all = (row_sums(side - none, sequences.distinct) for side in (value, whole))
    low, high = (np.nan, np.nan) if len(of_all) < FEWEST else ratio_interval(carried, of_all)
    unseen = unseen_share(len(of_all))
    least = float((value - none).mean() / (whole - none).mean()) if np.isnan(low) else low
    # If `low` is negative, unseen pairs that carry nothing would raise it, so `low` itself is the worst case.
    return {"low": low, "high": high, "unseen": unseen, "worst": min(least, (1 - unseen) * least)}


def require_gap(sequences: TaskSequences, whole: Values, none: Values, ends: tuple[str, str]) -> tuple[float, float]:
    """Return the mean of `whole` - `none` over pairs, and its standard error.

    `whole` and `none` are the values of each pair at both ends of a scale, in units of the metric; `ends` are words for
    both. Raises ValueError if the 95 % interval of this gap contains 0, because a share of the gap could then be any
    number.
    """
    distinct = sequences.distinct
    gap, gap_se = float((whole - none).mean()), standard_error(whole - none, distinct)
    n_distinct = len(whole) if distinct is None else int(distinct.max()) + 1
    # Written in this way so that NaN, such as the error of a single distinct pair, is refused too.
    if abs(gap) > scipy.stats.t.ppf(0.975, n_distinct - 1) * gap_se:
        return gap, gap_se
    if not np.isfinite(gap):
        reason = ", not a finite number: look at the values that the metric returns on these prompts"
    elif n_distinct < 2:
        reason = " for one distinct pair, so its error is unknown: give two distinct pairs or more"
    elif gap_se == 0:
        reason = " on every pair: give pairs whose two prompts the model tells apart"
    else:
        reason = f" with standard error {short_number(gap_se)}: give more pairs, or others that the model tells apart"
    values = [f"{short_number(mean)} {end}" for mean, end in zip((whole.mean(), none.mean()), ends, strict=True)]
    raise ValueError(
        f"{sequences.name}: the value is {' and '.join(values)}, too close for a share of their gap. The gap is "
        f"{short_number(gap)}{reason}{naming_open_contexts()}"
    )
