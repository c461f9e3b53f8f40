"""Within-model percentiles of the strongest heads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.stats

from tlspectral.errors import earlier_calls
from tlspectral.stats.values import require_one_population, table_columns
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class TopHeadPercentile:
    """Within-model percentiles of the k strongest heads.

    Attributes:
        statistic: median of `percentiles`: FP's, rank / n.
        statistic_midrank: the same with `(rank - 1/2) / n`, which is 1/2 on average for heads taken at random whatever
            the number of heads.
        percentiles: rank / n of each of the heads, ties sharing their mean rank, strongest head first.
        heads: (layer, head) of each.
        k: heads taken.
        n: heads ranked.
        n_dropped: heads left out because the column is NaN (not ranked) or the behaviour is (ranked, not taken).
        tied_at_border: heads not taken whose behaviour equals the behaviour of the last one taken.
        method: the rule, in words.
    """

    _repr_html_ = html_summary

    statistic: float
    statistic_midrank: float
    percentiles: tuple[float, ...]
    heads: tuple[tuple[int, int], ...]
    k: int
    n: int
    n_dropped: int
    tied_at_border: int
    method: str


@earlier_calls(heads="table")
def top_head_percentile(
    table: pd.DataFrame, *, column: str = "D_head", by: str = "prev", k: int = 5
) -> TopHeadPercentile:
    """Return the median within-model percentile of the k strongest heads (FP Table 2, last column).

    Args:
        table: one row per head of one model, with `layer` and `head`.
        column: what is ranked within the model.
        by: what the strongest heads are taken by. Among equal ones the lower layer goes first, then the lower head;
            `tied_at_border` says how many were left out that way.
        k: heads taken.

    Returns:
        `TopHeadPercentile`. Heads whose column is NaN are not ranked, those whose behaviour is NaN cannot be taken.

    Raises:
        ValueError: a column that the table lacks, heads of several models or steps, k below 1, or fewer than k heads
            with both numbers.

    What it does not establish: that heads of this kind have this rank: the median of five can hide two that do not.
    """
    ranked, strength, layer, head = table_columns(table, [column, by, "layer", "head"]).T
    require_one_population(table)
    known = ~np.isnan(ranked)
    usable = np.flatnonzero(known & ~np.isnan(strength))
    if k < 1:
        raise ValueError(f"k must be at least 1, found {k}")
    if k > len(usable):
        raise ValueError(f"k={k} heads were asked for, and {len(usable)} have both {column} and {by}")
    n = int(known.sum())
    ranks = np.full(len(table), np.nan)
    ranks[known] = scipy.stats.rankdata(ranked[known])
    order = usable[np.lexsort((head[usable], layer[usable], -strength[usable]))]
    strongest = order[:k]
    return TopHeadPercentile(
        statistic=float(np.median(ranks[strongest] / n)),
        statistic_midrank=float(np.median((ranks[strongest] - 0.5) / n)),
        percentiles=tuple(float(rank) / n for rank in ranks[strongest]),
        heads=tuple((int(layer[row]), int(head[row])) for row in strongest),
        k=k,
        n=n,
        n_dropped=len(table) - len(usable),
        tied_at_border=int((strength[order[k:]] == strength[strongest[-1]]).sum()),
        method=f"median of rank / n of {column} over the top {k} by {by}, ties by layer and head",
    )
