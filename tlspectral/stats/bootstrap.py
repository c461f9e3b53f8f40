"""Intervals for a partial correlation, and for its share that added controls remove, from resampled layers.

Heads of a layer are not independent, so whole layers are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import pandas as pd
from jaxtyping import Float64, Int64

from tlspectral.errors import earlier_calls
from tlspectral.errors.settings import checked_settings
from tlspectral.stats.correlations import PartialCorrelation, RankMethod, partial_correlation, residual_correlation
from tlspectral.stats.jackknife import FEWEST_CLUSTERS, jackknife
from tlspectral.stats.values import (
    as_names,
    complete_rows,
    require_columns,
    require_known,
    require_one_population,
    table_columns,
)
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class LayerBootstrap:
    """A partial rank correlation with intervals over layers; `tls.stats.layer_bootstrap` returns it.

        heads = tls.analyze_heads(model)
        result = tls.stats.layer_bootstrap(heads, "D_head", "prev", controls="dir_frac")
        result.statistic, result.interval

    A cluster is a layer.

    Attributes:
        statistic: the correlation in the table itself, -1 to 1.
        interval: (low, high), percentiles of the correlation over resamples of layers, as in "Fingerprint, Not
            Blueprint".
        interval_jackknife: (low, high) by Student's t, from leaving out one layer after another.
        pvalue: two-sided p of the same t test. It is below 1 - level if `interval_jackknife` does not contain 0.
        se: standard deviation of the correlation over resamples.
        n: rows used.
        n_dropped: rows left out because a value was NaN.
        n_clusters: layers among the rows used.
        draws: number of resamples.
        n_degenerate: resamples left out because they have no correlation (a constant variable, too few rows).
        level: level of the intervals.
        seed: seed of the resampling.
        method: estimator and interval, in words.
        reason: why numbers are NaN, else None.
    """

    _repr_html_ = html_summary

    statistic: float
    interval: tuple[float, float]
    interval_jackknife: tuple[float, float]
    pvalue: float
    se: float
    n: int
    n_dropped: int
    n_clusters: int
    draws: int
    n_degenerate: int
    level: float
    seed: int
    method: str
    reason: str | None = None


@earlier_calls(heads="table")
@checked_settings
def layer_bootstrap(
    table: pd.DataFrame,
    x: str = "D_head",
    y: str = "prev",
    controls: str | Sequence[str] = ("dir_frac",),
    *,
    method: RankMethod = "hybrid",
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> LayerBootstrap:
    """Compute the partial rank correlation of two columns of a head table, with an interval over layers.

    Use it instead of a plain p-value, because heads of a layer are not independent ("Fingerprint, Not Blueprint", Table
    2).

    >>> import pandas as pd, tlspectral as tls
    >>> heads = pd.DataFrame({"layer": [0, 0, 1, 1, 2, 2]})
    >>> heads = heads.assign(x=[1, 2, 3, 4, 5, 7], y=[1, 3, 2, 5, 4, 6])
    >>> result = tls.stats.layer_bootstrap(heads, "x", "y", controls=(), draws=200)
    >>> round(result.statistic, 2), result.n_clusters
    (0.89, 3)

    Args:
        table: one row per head, of one model at one step, with a column `layer`.
        x, y: names of the two columns. Default: "D_head" and "prev".
        controls: name or names of the control columns. Default: "dir_frac"; `()` gives the plain Spearman correlation.
        method: "hybrid" (default): regress raw values on the controls, then rank the residuals. "rank": rank first.
        draws: number of resamples of layers, with replacement. Default: 2000. Each resample regresses anew.
        level: level of the intervals. Default: 0.95.
        seed: seed of the resampling. Default: 0. The order of rows has no effect beyond rounding.

    Returns:
        `LayerBootstrap` with `.statistic` (the correlation, -1 to 1), `.interval` (percentiles over resamples),
            `.interval_jackknife` and `.pvalue` (t test from leaving out each layer), `.se`, `.n`, `.n_dropped` (rows
            with NaN), `.n_clusters` (layers) and `.reason` (why numbers are NaN). Intervals and p are NaN for fewer
            than three layers, or if more than half of the resamples have no correlation.

    Raises:
        ValueError: the table lacks a column or has several models or steps, a value is infinite under "hybrid", the
            method is unknown, `draws` is below 2, or `level` is outside (0, 1).

    Not established: anything about other models, or significance if columns drift with depth. In simulations at nominal
    5 %, `interval` misses the truth in 6.0 to 9.1 % of tables, `interval_jackknife` in 3.8 to 6.1 %. More:
    docs/statistics.md
    """
    require_known("method", method, get_args(RankMethod))
    _check_resampling(draws, level)
    variables, clusters = _complete(table, [x, y, *as_names(controls)])
    observed = partial_correlation(variables, method)
    resampled = _over_resamples(clusters, draws, seed, lambda rows: residual_correlation(variables[rows], method)[0])
    interval, reason = _interval_or_reason(resampled, level, n_clusters := len(np.unique(clusters)))
    if observed.reason is not None:
        interval, reason = (math.nan, math.nan), observed.reason
    usable = resampled[~np.isnan(resampled)]
    se = float(usable.std(ddof=1)) if reason is None else math.nan
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
        se=se,
        n=observed.n,
        n_dropped=len(table) - observed.n,
        n_clusters=n_clusters,
        draws=draws,
        n_degenerate=draws - len(usable),
        level=level,
        seed=seed,
        method=f"{method} partial, controls refitted in each resample of clusters, percentile interval",
        reason=reason,
    )


@dataclass(frozen=True)
class Attenuation:
    """A partial correlation before and after controls were added, on the same rows; `tls.stats.attenuation` returns it.

        heads = tls.analyze_heads(model)
        result = tls.stats.attenuation(heads, "freq_centroid", x="D_head", y="prev")
        result.before.statistic, result.after.statistic, result.statistic

    Attributes:
        before: `PartialCorrelation` with the base controls only.
        after: `PartialCorrelation` with the base and the added controls.
        statistic: `1 - after / before`. 0: nothing changed; 1: nothing is left; above 1: the sign changed.
        interval: (low, high), percentiles of the statistic over resamples of layers; NaN without draws.
        n: rows used.
        n_dropped: rows left out because a value was NaN.
        n_clusters: layers among the rows used.
        draws: number of resamples.
        n_degenerate: resamples without a statistic.
        level: level of the interval.
        seed: seed of the resampling.
        method: "hybrid" (regress raw values on the controls, then rank the residuals) or "rank" (rank all columns
            first).
        reason: why statistic or interval is NaN, else None.
    """

    _repr_html_ = html_summary

    before: PartialCorrelation
    after: PartialCorrelation
    statistic: float
    interval: tuple[float, float]
    n: int
    n_dropped: int
    n_clusters: int
    draws: int
    n_degenerate: int
    level: float
    seed: int
    method: str
    reason: str | None = None


@earlier_calls(heads="table")
@checked_settings
def attenuation(
    table: pd.DataFrame,
    controls: str | Sequence[str] = ("rope_imag_frac", "freq_centroid"),
    *,
    x: str = "D_head",
    y: str = "prev",
    base: str | Sequence[str] = ("dir_frac",),
    method: RankMethod = "hybrid",
    draws: int = 0,
    level: float = 0.95,
    seed: int = 0,
) -> Attenuation:
    """Compute the share of a partial correlation that further controls remove ("Fingerprint, Not Blueprint", Table 3).

    >>> import pandas as pd, tlspectral as tls
    >>> columns = {"x": [1, 2, 3, 4, 5, 7], "y": [1, 3, 2, 5, 4, 6], "z": [1, 3, 2, 4, 4, 7]}
    >>> heads = pd.DataFrame({"layer": [0, 0, 1, 1, 2, 2], **columns})
    >>> result = tls.stats.attenuation(heads, "z", x="x", y="y", base=())
    >>> round(result.before.statistic, 2), round(result.after.statistic, 2)
    (0.89, 0.09)
    >>> round(result.statistic, 2)
    0.9

    Use it to ask how much of the relation between two columns is shared with other columns of the table.

    Args:
        table: one row per head, of one model at one step, with a column `layer`.
        controls: name or names of the added control columns. Default: "rope_imag_frac" and "freq_centroid".
        x, y: names of the two correlated columns. Default: "D_head" and "prev".
        base: name or names of the controls in both correlations. Default: "dir_frac".
        method: "hybrid" (default): regress raw values on the controls, then rank the residuals. "rank": rank first. The
            paper prints both, and they can differ much.
        draws: number of resamples of layers for the interval; 0 (default) gives no interval.
        level, seed: level of the interval (default 0.95) and seed of the resampling (default 0).

    Returns:
        `Attenuation` with `.statistic` (1 - after / before, no unit), `.before` and `.after` (correlations, each with
            `.statistic`), `.interval`, `.n`, `.n_dropped` (rows with NaN) and `.reason`. The interval is NaN, with a
            reason, if the interval of the first correlation contains 0, because the share is then unbounded.

    Raises:
        ValueError: `controls` is empty, the table lacks a column or has several models or steps, a value is infinite
            under "hybrid", the method is unknown, `draws` is 1 or negative, or `level` is outside (0, 1).

    Not established: mediation. All columns come from the same weights; the share says how much variance they have in
    common. The share is wrong if x follows a control along a curve. More: docs/statistics.md
    """
    require_known("method", method, get_args(RankMethod))
    controls = as_names(controls)
    if not controls:
        raise ValueError("controls is empty: name at least one control to add")
    if draws:
        _check_resampling(draws, level)
    base = as_names(base)
    variables, clusters = _complete(table, [x, y, *base, *as_names(controls)])
    short = 2 + len(base)
    before, after = partial_correlation(variables[:, :short], method), partial_correlation(variables, method)
    n_clusters, n_degenerate, interval = len(np.unique(clusters)), 0, (math.nan, math.nan)
    reason = before.reason or after.reason
    if reason is None and before.statistic == 0:
        reason = "there is no correlation to attenuate"
    share = 1 - after.statistic / before.statistic if reason is None else math.nan
    if not draws:
        reason = reason or "draws=0 gives no interval"
    elif reason is None:
        befores = _over_resamples(
            clusters, draws, seed, lambda rows: residual_correlation(variables[rows, :short], method)[0]
        )
        afters = _over_resamples(clusters, draws, seed, lambda rows: residual_correlation(variables[rows], method)[0])
        shares = 1 - np.divide(afters, befores, out=np.full(draws, np.nan), where=befores != 0)
        n_degenerate = int(np.isnan(shares).sum())
        (low, high), reason = _interval_or_reason(befores, level, n_clusters)
        if reason is None and low <= 0 <= high:
            reason = f"the correlation before controls may be 0 ({low:.3f} to {high:.3f}), so its share is unbounded"
        if reason is None:
            interval, reason = _interval_or_reason(shares, level, n_clusters)
    return Attenuation(
        before=before,
        after=after,
        statistic=share,
        interval=interval,
        n=len(variables),
        n_dropped=len(table) - len(variables),
        n_clusters=n_clusters,
        draws=draws,
        n_degenerate=n_degenerate,
        level=level,
        seed=seed,
        method=method,
        reason=reason,
    )


def _check_resampling(draws: int, level: float) -> None:
    """Raise ValueError unless `draws` is at least 2 and `level` lies between 0 and 1."""
    if draws < 2:
        raise ValueError(f"an interval needs at least two draws, found draws={draws}: give more, such as draws=2000")
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, found {level}: give for example level=0.95")


def _complete(
    heads: pd.DataFrame, names: Sequence[str]
) -> tuple[Float64[np.ndarray, "rows variables"], Int64[np.ndarray, "rows"]]:
    """Return two arrays about the rows of the table `heads` without NaN: the columns in `names` [rows, variables], and
    the layer of each row, numbered from 0 without gaps.

    Raises ValueError if the table lacks a column or mixes several models or steps.
    """
    require_columns(heads, ["layer"])
    require_one_population(heads)
    variables, clusters = table_columns(heads, names), pd.factorize(heads["layer"], sort=True)[0]
    complete = complete_rows(variables) & (clusters >= 0)
    return variables[complete], clusters[complete]


def _over_resamples(
    clusters: Int64[np.ndarray, "rows"], draws: int, seed: int, statistic: Callable[[np.ndarray], float]
) -> Float64[np.ndarray, "draws"]:
    """Return an array with the statistic of each of `draws` resamples of clusters; all NaN with fewer than three
    clusters.

    `clusters`: cluster (layer) of each row. `seed`: of the resampling. `statistic`: function of the row numbers of a
    resample that returns a number. A resample has as many clusters as the table, drawn with replacement, each with all
    its rows.
    """
    if len(np.unique(clusters)) < FEWEST_CLUSTERS:
        return np.full(draws, np.nan)
    members = [np.flatnonzero(clusters == cluster) for cluster in np.unique(clusters)]
    drawn = np.random.default_rng(seed).integers(len(members), size=(draws, len(members)))
    return np.array([statistic(np.concatenate([members[cluster] for cluster in chosen])) for chosen in drawn])


def _interval_or_reason(
    resampled: Float64[np.ndarray, "draws"], level: float, n_clusters: int
) -> tuple[tuple[float, float], str | None]:
    """Return (low, high) and None, or two NaN and the reason why no interval can be given.

    `resampled`: the statistic of each resample. The interval has the percentiles of the values that are not NaN, at
    `level`. It is not given for fewer than three of `n_clusters`, or if more than half of the values are NaN.
    """
    usable = resampled[~np.isnan(resampled)]
    if n_clusters < FEWEST_CLUSTERS:
        return (math.nan, math.nan), f"{n_clusters} clusters are fewer than {FEWEST_CLUSTERS}"
    if 2 * len(usable) < len(resampled):
        return (math.nan, math.nan), f"{len(resampled) - len(usable)} of {len(resampled)} resamples are degenerate"
    low, high = np.quantile(usable, [(1 - level) / 2, (1 + level) / 2])
    return (float(low), float(high)), None
