"""Intervals from resampling layers. Heads of a layer are not independent, so whole layers are drawn."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from tlspectral.stats.clusters import FEWEST_CLUSTERS, cluster_indices
from tlspectral.stats.correlations import Method, partial_correlation, residual_correlation
from tlspectral.stats.jackknife import jackknife
from tlspectral.stats.values import complete_rows, table_columns
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class LayerBootstrap:
    """A partial correlation with the interval that resampled clusters give.

    Attributes:
        statistic: the correlation of the table itself.
        interval: low and high end of the percentile interval, the paper's.
        interval_jackknife: by Student's t, from leaving out one cluster after another.
        pvalue: two-sided, of the same t: below 1 - level where `interval_jackknife` leaves 0 out.
        stderr: standard deviation over resamples.
        n: rows used.
        n_dropped: rows left out because a value was NaN.
        n_clusters: clusters among the rows used.
        draws: resamples.
        n_degenerate: resamples without a correlation (a constant variable, too few rows), left out.
        level: of the interval.
        seed: of the resampling.
        method: estimator and interval, in words.
        reason: why numbers are NaN, else None.
    """

    _repr_html_ = html_summary

    statistic: float
    interval: tuple[float, float]
    interval_jackknife: tuple[float, float]
    pvalue: float
    stderr: float
    n: int
    n_dropped: int
    n_clusters: int
    draws: int
    n_degenerate: int
    level: float
    seed: int
    method: str
    reason: str | None = None


def layer_bootstrap(
    heads: pd.DataFrame,
    x: str = "D_head",
    y: str = "prev",
    controls: Sequence[str] = ("dir_frac",),
    *,
    cluster: str | Sequence[str] = "layer",
    method: Method = "hybrid",
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> LayerBootstrap:
    """Partial rank correlation of two columns with an interval over layers ("Fingerprint, Not Blueprint", Table 2).

    Layers are drawn with replacement, as many as there are. Controls are taken out again in each resample. `interval`
    is the percentile interval, as in the paper. Residuals computed once on the whole table would make it too narrow. It
    is too narrow as it is: of simulated tables with 12 to 30 layers it leaves out the truth in 6.0 to 9.1 %, where 5 %
    is nominal. `interval_jackknife` and p, from leaving out one layer after another, do so in 3.8 to 6.1 %.

    Args:
        heads: one row per head.
        x, y, controls: columns; no control gives the plain Spearman correlation.
        cluster: what is drawn: `"layer"`, or `("layer", "kv_head")` for groups of heads that share keys.
        method: of `partial_spearman`.
        draws: resamples.
        level: of the interval.
        seed: of the resampling; the result does not depend on the order of the rows, beyond rounding.

    Returns:
        `LayerBootstrap`. Rows with a NaN in a column used are left out and counted. With fewer than three clusters, or
        where more than half of the resamples are degenerate, interval and p are NaN with a reason.

    Raises:
        ValueError: a column that the table lacks, infinite values under `"hybrid"`, fewer than two draws, a level
            outside (0, 1), or `"kv_head"` as the only cluster column.

    What it does not establish: anything about other models: layers of one network were trained together. Nor
    significance where columns drift with depth: layers are taken as independent. If neighbouring ones correlate by 0.7,
    p rejects 9.6 to 14.6 % at nominal 5 %, and `partial_spearman(layers=)` does not (docs/statistics.md).
    """
    check_resampling(draws, level)
    variables, clusters = variables_and_clusters(heads, [x, y, *controls], cluster)
    complete = complete_rows(variables) & (clusters >= 0)
    variables, clusters = variables[complete], clusters[complete]
    observed = partial_correlation(variables, method)
    resampled = over_resamples(clusters, draws, seed, lambda rows: residual_correlation(variables[rows], method)[0])
    interval, reason = interval_or_reason(resampled, level, n_clusters := len(np.unique(clusters)))
    if observed.reason is not None:
        interval, reason = (math.nan, math.nan), observed.reason
    usable = resampled[~np.isnan(resampled)]
    stderr = float(usable.std(ddof=1)) if reason is None else math.nan
    left_out = [residual_correlation(variables[clusters != cluster], method)[0] for cluster in np.unique(clusters)]
    interval_jackknife, pvalue = jackknife(
        observed.statistic if reason is None else math.nan, np.array(left_out), level
    )
    if reason is None and math.isnan(pvalue):
        reason = "without one of the clusters there is no correlation, so interval_jackknife and pvalue are NaN"
    return LayerBootstrap(
        statistic=observed.statistic,
        interval=interval,
        interval_jackknife=interval_jackknife,
        pvalue=pvalue,
        stderr=stderr,
        n=observed.n,
        n_dropped=len(complete) - observed.n,
        n_clusters=n_clusters,
        draws=draws,
        n_degenerate=draws - len(usable),
        level=level,
        seed=seed,
        method=f"{method} partial, controls refitted in each resample of clusters, percentile interval",
        reason=reason,
    )


def check_resampling(draws: int, level: float) -> None:
    """Refuse numbers of draws and levels that give no interval."""
    if draws < 2:
        raise ValueError(f"an interval needs at least two draws, found draws={draws}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, found {level}")


def variables_and_clusters(
    heads: pd.DataFrame, names: Sequence[str], cluster: str | Sequence[str]
) -> tuple[Float64[np.ndarray, "rows variables"], Int64[np.ndarray, "rows"]]:
    """Return the named columns, and the index of each row's cluster."""
    return table_columns(heads, names), cluster_indices(heads, cluster)


def over_resamples(
    clusters: Int64[np.ndarray, "rows"], draws: int, seed: int, statistic: Callable[[np.ndarray], float]
) -> Float64[np.ndarray, "draws"]:
    """Compute the statistic of each resample's rows; all NaN with too few clusters to resample."""
    if len(np.unique(clusters)) < FEWEST_CLUSTERS:
        return np.full(draws, np.nan)
    return np.array([statistic(rows) for rows in cluster_resamples(clusters, draws, seed)])


def cluster_resamples(
    clusters: Int64[np.ndarray, "rows"], draws: int, seed: int
) -> Iterator[Int64[np.ndarray, "resampled"]]:
    """Yield the rows of each resample: as many clusters as there are, drawn with replacement, with all their rows."""
    members = [np.flatnonzero(clusters == cluster) for cluster in np.unique(clusters)]
    drawn = np.random.default_rng(seed).integers(len(members), size=(draws, len(members)))
    for chosen in drawn:
        yield np.concatenate([members[cluster] for cluster in chosen])


def interval_or_reason(
    resampled: Float64[np.ndarray, "draws"], level: float, n_clusters: int
) -> tuple[tuple[float, float], str | None]:
    """Return the percentile interval of the values that are not NaN, or NaN and the reason."""
    usable = resampled[~np.isnan(resampled)]
    if n_clusters < FEWEST_CLUSTERS:
        return (math.nan, math.nan), f"{n_clusters} clusters are fewer than {FEWEST_CLUSTERS}"
    if 2 * len(usable) < len(resampled):
        return (math.nan, math.nan), f"{len(resampled) - len(usable)} of {len(resampled)} resamples are degenerate"
    low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high)), None
