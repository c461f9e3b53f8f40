"""Intervals from resampling layers: heads of a layer are not independent, layers are drawn as a whole."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from tlspectral.stats.clusters import FEWEST_CLUSTERS, cluster_places
from tlspectral.stats.correlations import Method, partial_correlation, residual_correlation
from tlspectral.stats.values import complete_rows, table_columns
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class LayerBootstrap:
    """A partial correlation with the interval that resampled clusters give.

    Attributes:
        statistic: the correlation of the table itself.
        interval: low and high end of the percentile interval.
        pvalue: two-sided, from the same resamples: twice the share (with one added to both counts) on the far side of
            0. No finer than 2 / (draws + 1); below 1 - level where the interval leaves 0 out.
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

    As many layers as there are, drawn with replacement; controls are taken out anew inside each resample; percentile
    interval. Residuals computed once on the whole table give another, too narrow interval.

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

    What it does not establish: anything about other models: layers of one network were trained together. With fewer
    than some ten layers percentile intervals are too narrow.
    """
    check_resampling(draws, level)
    variables, place = variables_and_clusters(heads, [x, y, *controls], cluster)
    kept = complete_rows(variables) & (place >= 0)
    variables, place = variables[kept], place[kept]
    whole = partial_correlation(variables, method)
    found = over_resamples(place, draws, seed, lambda rows: residual_correlation(variables[rows], method)[0])
    interval, reason = interval_or_reason(found, level, n_clusters := len(np.unique(place)))
    if whole.reason is not None:
        interval, reason = (math.nan, math.nan), whole.reason
    usable = found[~np.isnan(found)]
    beyond = min((usable <= 0).sum(), (usable >= 0).sum())
    return LayerBootstrap(
        statistic=whole.statistic,
        interval=interval,
        pvalue=min(1.0, float(2 * (beyond + 1) / (len(usable) + 1))) if reason is None else math.nan,
        stderr=float(usable.std(ddof=1)) if reason is None else math.nan,
        n=whole.n,
        n_dropped=len(kept) - whole.n,
        n_clusters=n_clusters,
        draws=draws,
        n_degenerate=draws - len(usable),
        level=level,
        seed=seed,
        method=f"{method} partial, controls refitted in each resample of clusters, percentile interval",
        reason=reason,
    )


def check_resampling(draws: int, level: float) -> None:
    """Refuse what gives no interval."""
    if draws < 2:
        raise ValueError(f"an interval needs at least two draws, found draws={draws}")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, found {level}")


def variables_and_clusters(
    heads: pd.DataFrame, names: Sequence[str], cluster: str | Sequence[str]
) -> tuple[Float64[np.ndarray, "rows variables"], Int64[np.ndarray, "rows"]]:
    """The named columns, and the number of each row's cluster."""
    return table_columns(heads, names), cluster_places(heads, cluster)


def over_resamples(
    place: Int64[np.ndarray, "rows"], draws: int, seed: int, statistic: Callable[[np.ndarray], float]
) -> Float64[np.ndarray, "draws"]:
    """The statistic of the rows of each resample; all NaN with too few clusters to resample."""
    if len(np.unique(place)) < FEWEST_CLUSTERS:
        return np.full(draws, np.nan)
    return np.array([statistic(rows) for rows in cluster_resamples(place, draws, seed)])


def cluster_resamples(
    place: Int64[np.ndarray, "rows"], draws: int, seed: int
) -> Iterator[Int64[np.ndarray, "resampled"]]:
    """Rows of each resample: as many clusters as there are, drawn with replacement, every row of each."""
    members = [np.flatnonzero(place == cluster) for cluster in np.unique(place)]
    drawn = np.random.default_rng(seed).integers(len(members), size=(draws, len(members)))
    for chosen in drawn:
        yield np.concatenate([members[cluster] for cluster in chosen])


def interval_or_reason(
    found: Float64[np.ndarray, "draws"], level: float, n_clusters: int
) -> tuple[tuple[float, float], str | None]:
    """The percentile interval of the draws that are no NaN, or NaN and why there is none."""
    usable = found[~np.isnan(found)]
    if n_clusters < FEWEST_CLUSTERS:
        return (math.nan, math.nan), f"{n_clusters} clusters are fewer than {FEWEST_CLUSTERS}"
    if 2 * len(usable) < len(found):
        return (math.nan, math.nan), f"{len(found) - len(usable)} of {len(found)} resamples are degenerate"
    low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high)), None
