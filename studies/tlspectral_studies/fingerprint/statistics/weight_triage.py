"""How well columns that are computed from weights alone find heads with a certain behaviour."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import scipy.special
import scipy.stats
from jaxtyping import Bool, Float64, Int64

from tlspectral.stats.jackknife import FEWEST_CLUSTERS
from tlspectral.stats.values import complete_rows, require_columns, table_columns
from tlspectral.tables.schema import Column, Schema, columns
from tlspectral_studies.fingerprint.statistics.intraclass import cluster_indices
from tlspectral_studies.fingerprint.statistics.reasons import REASONS, documented

_LEVEL = 0.95


def _columns(ks: Sequence[int]) -> tuple[Column, ...]:
    precision = "share | Share of positives among so many heads with the highest score, equal ones by layer, then head."
    return columns(
        """
        score     | label | Column of the head table that is to point at heads with a behaviour.
        direction | label | higher where heads with the behaviour score higher (auc above 1/2), lower, or none.
        auc       | share | Share of pairs of a positive and another head in which the positive is higher, ties half.
        auc_low   | share | Lower end of its 95 % interval.
        auc_high  | share | Upper end of that interval.
        """
        + "\n".join(f"precision_at_{k} | {precision}" for k in ks)
        + """
        base_rate  | share | Share of positives among the heads: the precision of picking at random.
        n          | count | Heads that have both score and behaviour.
        n_positive | count | Heads whose behaviour exceeds the threshold.
        n_dropped, reason
        """,
        REASONS,
    )


TRIAGE = Schema("triage", _columns((5, 10, 20)))


def triage(
    heads: pd.DataFrame,
    *,
    scores: Sequence[str] = ("rope_imag_frac", "D_head_pct", "dir_frac"),
    threshold: float = 0.5,
    ks: Sequence[int] = (5, 10, 20),
) -> pd.DataFrame:
    """Find heads with a behaviour from weights alone ("Fingerprint, Not Blueprint", section 11, "Practical reading").

    A head is positive where `prev` exceeds the threshold. Each score is read as "the higher, the more likely
    positive", for every model alike, whatever the data show; `direction` gives the direction that the data show.

    Args:
        heads: one row per head of one model, with `layer`, `head` and `prev`.
        scores: columns; `D_head_pct` is made from `D_head` where the table lacks it.
        threshold: positive above it.
        ks: numbers of heads to look at.

    Returns:
        DataFrame, a score a row. Columns: `score, direction, auc, auc_low, auc_high, precision_at_5, precision_at_10,
        precision_at_20, base_rate, n, n_positive, n_dropped, reason`. The interval has the variance of DeLong, with
        heads of a layer depending on each other (Obuchowski 1997), on the logit scale, and Student's t with one degree
        of freedom less than layers that have positives (or negatives, where those are fewer). `reason`: no head or
        every head is positive, the score is missing or constant, k exceeds the number of heads, or an interval is not
        defined (AUC 0 or 1, positives or negatives in fewer than two layers, fewer than three layers).

    Raises:
        ValueError: a table without layer, head or prev, k below 1, or no score.

    What it does not establish: that the score works on another model: under learned absolute positions or ALiBi the
    same columns mislead; nor what the threshold ought to be. With a handful of positives the interval is a rough one.
    """
    require_columns(heads, ["layer", "head", "prev"])
    if not scores or any(k < 1 for k in ks):
        raise ValueError(f"give at least one score, and k of at least 1; found scores={scores}, ks={ks}")
    rows = [_score_row(heads, score, threshold, ks) for score in scores]
    return documented(rows, replace(TRIAGE, columns=_columns(ks)))


def _score_row(heads: pd.DataFrame, score: str, threshold: float, ks: Sequence[int]) -> dict[str, Any]:
    row: dict[str, Any] = {"score": score, "direction": "none", "n": 0, "n_positive": 0, "n_dropped": len(heads)}
    values = _score_values(heads, score)
    if values is None:
        return row | {"reason": f"the table has no column {score}"}
    behaves, layer, head = table_columns(heads, ["prev", "layer", "head"]).T
    layer_index = cluster_indices(heads, "layer")
    complete = complete_rows(values, behaves) & (layer_index >= 0)
    values, positive, layer_index = values[complete], behaves[complete] > threshold, layer_index[complete]
    n, n_positive = len(values), int(positive.sum())
    row |= {"n": n, "n_positive": n_positive, "n_dropped": len(complete) - n}
    if not n:
        return row | {"reason": f"no head has both {score} and prev"}
    row["base_rate"] = n_positive / n
    order = np.lexsort((head[complete], layer[complete], -values))
    row |= {f"precision_at_{k}": float(positive[order[:k]].mean()) for k in ks if k <= n}
    reasons = [f"{n} heads are fewer than k={k}" for k in ks if k > n]
    if n_positive in (0, n):
        reasons.insert(0, f"{'no' if n_positive == 0 else 'every'} head has prev above {threshold}")
    elif (values == values[0]).all():
        reasons.insert(0, f"{score} is constant")
    else:
        auc, low, high, reason = _auc(values, positive, layer_index)
        row |= {"auc": auc, "auc_low": low, "auc_high": high}
        row["direction"] = "none" if auc == 0.5 else "higher" if auc > 0.5 else "lower"
        reasons = ([reason] if reason is not None else []) + reasons
    return row | {"reason": "; ".join(reasons) or None}


def _score_values(heads: pd.DataFrame, score: str) -> Float64[np.ndarray, "rows"] | None:
    if score in heads:
        return table_columns(heads, [score])[:, 0]
    if score != "D_head_pct" or "D_head" not in heads:
        return None
    values = table_columns(heads, ["D_head"])[:, 0]
    known = ~np.isnan(values)
    values[known] = scipy.stats.rankdata(values[known]) / max(known.sum(), 1)
    return values


def _auc(
    values: Float64[np.ndarray, "rows"], positive: Bool[np.ndarray, "rows"], layer_index: Int64[np.ndarray, "rows"]
) -> tuple[float, float, float, str | None]:
    """Return the AUC, its interval, and the reason why it has none.

    A positive's placement is the share of negatives below it, a negative's the share of positives above it. Their means
    are the AUC, and their sums over layers, less what the AUC expects, give its variance.
    """
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    u: Any = scipy.stats.mannwhitneyu(values[positive], values[~positive], method="asymptotic")
    auc = float(u.statistic) / (n_positive * n_negative)
    ranks = scipy.stats.rankdata(values)
    placement = np.empty(len(values))
    placement[positive] = (ranks[positive] - scipy.stats.rankdata(values[positive])) / n_negative
    placement[~positive] = 1 - (ranks[~positive] - scipy.stats.rankdata(values[~positive])) / n_positive
    of_positive = np.bincount(layer_index, np.where(positive, placement - auc, 0))
    of_negative = np.bincount(layer_index, np.where(positive, 0, placement - auc))
    layers = len(np.unique(layer_index))
    with_positive, with_negative = len(np.unique(layer_index[positive])), len(np.unique(layer_index[~positive]))
    if auc in (0.0, 1.0):
        return auc, math.nan, math.nan, "the score separates the classes: no variance to make an interval of"
    if layers < FEWEST_CLUSTERS or min(with_positive, with_negative) < 2:
        return auc, math.nan, math.nan, f"positives lie in {with_positive} of {layers} layers: too few for an interval"
    variance = (
        _correction(with_positive) * (of_positive @ of_positive) / n_positive**2
        + _correction(with_negative) * (of_negative @ of_negative) / n_negative**2
        + 2 * _correction(layers) * (of_positive @ of_negative) / (n_positive * n_negative)
    )
    if variance <= 0:
        return auc, math.nan, math.nan, "the variance between layers vanishes: no interval"
    centre, half = scipy.special.logit(auc), math.sqrt(variance) / (auc * (1 - auc))
    half *= scipy.stats.t.ppf((1 + _LEVEL) / 2, min(with_positive, with_negative) - 1)
    low, high = scipy.special.expit([centre - half, centre + half])
    return auc, float(low), float(high), None


def _correction(clusters: int) -> float:
    return clusters / (clusters - 1)
