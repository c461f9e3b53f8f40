"""The share of a column's variance that lies between clusters of heads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Int64

from tlspectral.stats.jackknife import FEWEST_CLUSTERS
from tlspectral.stats.values import as_names, require_columns, require_one_population, table_columns
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class IntraclassCorrelation:
    """How similar rows of one cluster are.

    Attributes:
        statistic: intraclass correlation from the one-way analysis of variance, `(MSB - MSW) / (MSB + (m - 1) MSW)`:
            0 on average where clusters mean nothing, and negative by chance.
        pvalue: of the F test that all clusters have one mean.
        design_effect: `1 + (m - 1) statistic`, m the mean cluster size seen by a row: about the factor by which the
            variance of a mean exceeds that of independent rows.
        eta_squared: share of the sum of squares that lies between clusters, not corrected for chance.
        eta_squared_chance: what it is on average with random clusters of these sizes, `(n_clusters - 1) / (n - 1)`.
        n: rows used.
        n_dropped: rows left out because a value was NaN.
        n_clusters: clusters among the rows used.
        reason: why numbers are NaN, else None.
    """

    _repr_html_ = html_summary

    statistic: float
    pvalue: float
    design_effect: float
    eta_squared: float
    eta_squared_chance: float
    n: int
    n_dropped: int
    n_clusters: int
    reason: str | None = None


def intraclass_correlation(
    heads: pd.DataFrame, column: str, cluster: str | Sequence[str] = "layer"
) -> IntraclassCorrelation:
    """Intraclass correlation and design effect of a column ("Fingerprint, Not Blueprint", Table 2 and limitation iii).

    FP quotes "between-group variance" of grouped-query heads as the share of the sum of squares, which is large by
    chance where groups are small: the statistic here is corrected for that, and the share is given beside
    its chance value.

    Args:
        heads: one row per head.
        column: the numbers.
        cluster: `"layer"`, or several columns that name a cluster together: `("layer", "kv_head")`. Heads of several
            models need `"model"` among them.

    Returns:
        `IntraclassCorrelation`. Rows with a NaN are left out and counted. NaN with a reason for fewer than three
        clusters, clusters of one row each, or a constant column.

    Raises:
        ValueError: a column that the table lacks, infinite values, `"kv_head"` without the layer, or heads of several
            models or steps whose clusters do not tell them apart.

    What it does not establish: by what factor the variance of another statistic than the mean is larger.
    """
    values = table_columns(heads, [column])[:, 0]
    clusters = cluster_indices(heads, cluster)
    if not {"model", "step"} & {*as_names(cluster)}:
        require_one_population(heads)
    complete = ~np.isnan(values) & (clusters >= 0)
    x, clusters = values[complete], np.unique(clusters[complete], return_inverse=True)[1]
    if np.isinf(x).any():
        raise ValueError(f"column {column!r} holds infinite values, which have no variance")
    n, sizes = len(x), np.bincount(clusters) if len(x) else np.zeros(0)
    counts: dict[str, Any] = {"n": n, "n_dropped": len(complete) - n, "n_clusters": len(sizes)}
    reason = None
    if len(sizes) < FEWEST_CLUSTERS:
        reason = f"{len(sizes)} clusters are fewer than {FEWEST_CLUSTERS}"
    elif len(sizes) == n:
        reason = "every cluster has one row"
    elif (x == x[0]).all():
        reason = f"column {column!r} is constant"
    if reason is not None:
        nan = math.nan
        return IntraclassCorrelation(nan, nan, nan, nan, nan, **counts, reason=reason)
    means = np.bincount(clusters, x) / sizes
    between = float(sizes @ (means - x.mean()) ** 2)
    within = float(((x - means[clusters]) ** 2).sum())
    msb, msw = between / (len(sizes) - 1), within / (n - len(sizes))
    m = (n - (sizes**2).sum() / n) / (len(sizes) - 1)
    correlation = (msb - msw) / (msb + (m - 1) * msw)
    return IntraclassCorrelation(
        statistic=float(correlation),
        pvalue=float(scipy.stats.f.sf(msb / msw, len(sizes) - 1, n - len(sizes))) if msw > 0 else 0.0,
        design_effect=float(1 + ((sizes**2).sum() / n - 1) * correlation),
        eta_squared=between / (between + within),
        eta_squared_chance=(len(sizes) - 1) / (n - 1),
        **counts,
    )


def cluster_indices(heads: pd.DataFrame, cluster: str | Sequence[str]) -> Int64[np.ndarray, "rows"]:
    """Return the index of each row's cluster, from 0 in sorted order; -1 where a cluster column has no value.

    Raises:
        ValueError: no cluster column, one that the table lacks, or `"kv_head"` alone, which every layer numbers anew.
    """
    names = [cluster] if isinstance(cluster, str) else list(cluster)
    if not names:
        raise ValueError("name at least one cluster column")
    require_columns(heads, names)
    if names == ["kv_head"]:
        raise ValueError("kv_head is numbered anew in every layer: give cluster=('layer', 'kv_head')")
    return heads.groupby(names, sort=True, dropna=True).ngroup().fillna(-1).to_numpy().astype(np.int64)
