"""Percentiles of the strongest heads within their model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.stats

from tlspectral.errors import earlier_calls
from tlspectral.errors.settings import checked_settings
from tlspectral.stats.values import require_one_population, table_columns
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class TopHeadPercentile:
    """Percentiles, within their model, of the k strongest heads; `tls.stats.top_head_percentile` returns it.

        heads = tls.analyze_heads(model)
        result = tls.stats.top_head_percentile(heads, column="D_head", by="prev", k=5)  # ranked; chooses heads
        result.statistic, result.percentiles

    Attributes:
        statistic: median over the k heads of rank / n. 1 is the largest value of the ranked column.
        statistic_midrank: the same with `(rank - 1/2) / n`. Random heads have 1/2 on average, for any number of heads.
        percentiles: rank / n of each of the k heads, strongest head first; tied heads share their mean rank.
        heads: (layer, head) of each of the k heads.
        k: number of heads taken.
        n: number of heads ranked.
        n_dropped: heads left out because `column` is NaN (not ranked) or `by` is NaN (ranked, not taken).
        tied_at_border: heads left out whose `by` equals the `by` of the last head taken.
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
@checked_settings
def top_head_percentile(
    table: pd.DataFrame, *, column: str = "D_head", by: str = "prev", k: int = 5
) -> TopHeadPercentile:
    """Return how high the k strongest heads of one column rank in another column, within their model.

    >>> import pandas as pd, tlspectral as tls
    >>> heads = pd.DataFrame({"layer": [0, 0, 1, 1], "head": [0, 1, 0, 1]})
    >>> heads = heads.assign(D_head=[0.1, 0.4, 0.3, 0.2], prev=[0.0, 0.9, 0.8, 0.1])
    >>> result = tls.stats.top_head_percentile(heads, k=2)
    >>> result.percentiles, result.statistic
    ((1.0, 0.75), 0.875)

    Use it to ask whether heads with a strong behaviour have unusual values in another column ("Fingerprint, Not
    Blueprint", Table 2, last column).

    Args:
        table: one row per head of one model, with `layer` and `head`.
        column: the column that is ranked, from lowest to highest. Default: "D_head".
        by: the column that chooses the strongest heads. Default: "prev". Among equal heads the lower layer goes first,
            then the lower head.
        k: number of strongest heads. Default: 5.

    Returns:
        `TopHeadPercentile` with `.percentiles` (rank / n in `column` of each of the k heads, strongest first; 1 is the
            largest value), `.statistic` (their median), `.statistic_midrank` (median of (rank - 1/2) / n, which is 1/2
            on average for random heads), `.heads` (layer and head), `.k`, `.n` (heads ranked), `.n_dropped` (heads with
            NaN: in `column`, not ranked; in `by`, not taken) and `.tied_at_border` (heads left out that equal the last
            head taken).

    Raises:
        ValueError: the table lacks a column or has several models or steps, `k` is below 1, or fewer than k heads have
            both numbers.

    Not established: that all heads of this kind have this rank. The median of five can hide two that do not. No p-value
    is given: k heads of one model are not independent.
    """
    ranked, strength, layer, head = table_columns(table, [column, by, "layer", "head"]).T
    require_one_population(table)
    known = ~np.isnan(ranked)
    usable = np.flatnonzero(known & ~np.isnan(strength))
    if k < 1:
        raise ValueError(f"k must be at least 1, found {k}: give the number of strongest heads")
    if k > len(usable):
        raise ValueError(f"k={k}, but only {len(usable)} heads have both {column} and {by}: give a smaller k")
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
