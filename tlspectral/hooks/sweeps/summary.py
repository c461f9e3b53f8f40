"""Summary of a sweep in the statements of "Fingerprint, Not Blueprint" (sections 5 and 8), with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64

from tlspectral.heads.detectors import DETECTORS
from tlspectral.selection import head_name
from tlspectral.stats.correlations import benjamini_hochberg
from tlspectral.stats.jackknife import jackknife
from tlspectral.tables.head_columns import PART
from tlspectral.tables.meanings import MEANINGS, followed, warn_of_older
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import Schema, columns

_SMALL_EFFECT = {"induction": 0.01, "language": 0.01}  # nats, by task
_CORRELATED = ("dir_frac", "D_head", "rope_imag_frac", "prev")
_FEWEST_CORRELATED = 20  # heads
_LEVEL = 1.959964  # two-sided 95 %

SUMMARIZE_SWEEP = Schema(
    "summarize_sweep",
    (
        PART,
        *columns("""
            size_control | label        | none, score_rms (over the RMS removed), or random (less a random part's).
            statement    | label        | sum, share_small, detector_rank, effect_rank or rank_correlation.
            column       | label        | Column of the head table that a rank or correlation is about; else missing.
            value        | by statement | Metric (per logit under score_rms), share, rank from 1 or correlation.
            low          | as value     | Lower end of a 95 % interval: of sum over sequences, of share_small with all
                         |              | effects moved by 1.96 standard errors, of correlations over layers (of three
                         |              | at least). NaN for ranks.
            high         | as value     | Upper end of that interval.
            pvalue       | probability  | Of ranks rank / n, exact for a head chosen at random; of correlations
                         |              | Student's t over layers; else NaN.
            pvalue_floor | probability  | Smallest possible pvalue of a rank, 1 / n; else NaN.
            qvalue       | probability  | pvalue of correlations, corrected for their number (Benjamini-Hochberg).
            n            | count        | Heads behind the number; for ranks those that are ranked.
            note         | text         | Of sum what its interval is over, of ranks the head; else missing.
        """),
    ),
    "`tls.hooks.summarize_sweep`",
)


def summarize_sweep(
    sweep: pd.DataFrame | Sequence[pd.DataFrame],
    heads: pd.DataFrame,
    *,
    small: float | None = None,
) -> pd.DataFrame:
    """Summarise a sweep in statements, part by part, with and without control of the size of the removed part.

    `size_control` is `none` (effects as they are, in the unit of the metric, nats for a loss), `score_rms` (effect over
    the RMS removed, per unit of score: the fair comparison of parts that differ in size) or `random` (effect less that
    of a random part of equal size; with `control="random"` alone, and not for `output` and `long_range`, whose control
    is other heads). `statement` is one of

    * `sum`: of the effects of all heads.
    * `share_small`: share of heads with an absolute effect below `small`.
    * `detector_rank`: rank (1 is best) of the head whose ablation does the most harm (raises a loss the most, or lowers
      a metric of which more is better) among all heads by `prev`, `dup`, `ind`. `note` names the head.
    * `effect_rank`: the same asked the other way round: rank of the strongest head by `prev`, `dup` or `ind` among all
      measured heads by harm.
    * `rank_correlation`: Spearman of the effect with `dir_frac`, `D_head`, `rope_imag_frac` and `prev`, none of fewer
      than 20 heads.

    Args:
        sweep: of `ablation_sweep`, one table or several parts of one model. Heads that a screen left out do not count.
        heads: of `analyze_heads` for the same model; heads outside the sweep do not count.
        small: what counts as a small effect, in the unit of the metric. Default: 0.01 nats for the tasks `induction`
            and `language`; for a task of one's own it has to be given.

    Returns:
        DataFrame, a statement a row. Columns: `part, size_control, statement, column, value, low, high, pvalue,
        pvalue_floor, qvalue, n, note`.

    Raises:
        ValueError: no sweep, a head that `heads` lacks, one that is in a part twice, heads of another model, no `small`
            for a metric without a usual one, or a task that does not say whether a higher value is better.

    What it does not establish: that heads without effect do nothing, or that a column predicts which head matters: over
    one model this is one observation of circuits, not many. Intervals are not over models or tasks; where the sums per
    sequence do not fit the table, the interval of `sum` is the widest that the heads' errors allow. Layers are taken as
    independent: in simulated tables with neighbouring layers alike, `pvalue` of a correlation rejects 10.4 % at nominal
    5 %. The three detectors are not corrected for, and effects need not be linear in the size of what is removed.
    """
    tables = [sweep] if isinstance(sweep, pd.DataFrame) else list(sweep)
    rows: list[dict[str, Any]] = []
    for table in tables:
        require_same_model(heads, table.attrs, "the sweep's effects")
        warn_of_older(table, "the sweep")
        (what_is_small, harm), parts = _scale(table.attrs, small), table["part"].unique()
        for part in parts:
            measured = table.loc[(table["part"] == part) & table["delta"].notna()].reset_index(drop=True)
            rows += _part_rows(part, measured, heads, table.attrs if len(parts) == 1 else {}, what_is_small, harm)
    if not rows:
        raise ValueError("the sweep holds no measured effect")
    summary = pd.DataFrame(rows, columns=[column.name for column in SUMMARIZE_SWEEP.columns])
    of_correlations = summary["pvalue"].where(summary["statement"] == "rank_correlation")
    summary["qvalue"] = benjamini_hochberg(of_correlations.to_numpy(float)).q
    return SUMMARIZE_SWEEP.frame(summary, {MEANINGS: min(followed(table.attrs) for table in tables)})


def _scale(attrs: Any, small: float | None) -> tuple[float, int]:
    """Return what a small effect is, and 1 where a higher value is worse, -1 where it is better."""
    if "task" not in attrs:
        raise ValueError("the table does not hold its task (pd.concat drops attrs): give the sweeps as a list")
    task, higher_is_better = attrs["task"], attrs.get("higher_is_better")
    if higher_is_better is None:
        raise ValueError(
            f"the sweep's task ({task}) does not say whether a higher value is better, so harm cannot be ranked: give "
            "tls.Task(..., higher_is_better=True or False)"
        )
    if small is None and task not in _SMALL_EFFECT:
        raise ValueError(f"say with small= what a small effect is, in the unit of the metric of {task}")
    return _SMALL_EFFECT[task] if small is None else small, -1 if higher_is_better else 1


def _part_rows(
    part: str, measured: pd.DataFrame, heads: pd.DataFrame, attrs: Any, small: float, harm: int
) -> Iterator[dict[str, Any]]:
    if measured.duplicated(["layer", "head"]).any():
        raise ValueError(f"{part}: a head is in the sweep twice; pass tables of different sweeps as a list")
    joined = measured.merge(heads, on=["layer", "head"], how="left", suffixes=("", "_of_heads"), indicator=True)
    missing = np.flatnonzero(joined["_merge"] != "both")
    if len(missing):
        layer, head = joined.loc[missing[0], ["layer", "head"]]
        raise ValueError(f"heads lacks L{layer}H{head} of the sweep: analyse the whole model")
    if joined.empty:
        return
    sums = attrs.get("sums_per_sequence") or {}
    for control, name, effect, error in _effects(joined):
        start = {"part": part, "size_control": control}
        usable = np.isfinite(effect)
        if not usable.any():
            continue
        yield start | _sum(effect[usable], error[usable], sums.get(name))
        if control != "score_rms":
            size, slack = np.abs(effect[usable]), _LEVEL * np.nan_to_num(error[usable])
            share, low, high = (float((sizes < small).mean()) for sizes in (size, size + slack, size - slack))
            yield start | {"statement": "share_small", "value": share, "low": low, "high": high, "n": len(size)}
        usable_heads = joined.iloc[np.flatnonzero(usable)]
        ranks = _ranks(usable_heads, heads, harm * effect[usable])
        for statement in chain(ranks, _correlations(usable_heads, effect[usable])):
            yield start | statement


def _effects(joined: pd.DataFrame) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield the size control, its name among the sums, the effect of each head, and its standard error."""
    delta, error = joined["delta"].to_numpy(float), joined["delta_se"].to_numpy(float)
    yield "none", "delta", delta, error
    size = joined["score_rms"].to_numpy(float)
    size = np.where(size > 0, size, np.nan)
    yield "score_rms", "delta_per_rms", delta / size, error / size
    if "control_delta" in joined and joined["score_rms"].notna().any():  # else the control is other heads
        above = delta - joined["control_delta"].to_numpy(float)
        yield "random", "delta_above_control", above, np.hypot(error, joined["control_delta_se"].to_numpy(float))


def _sum(effect: np.ndarray, error: np.ndarray, per_sequence: Sequence[float] | None) -> dict[str, Any]:
    total = float(effect.sum())
    sums = np.asarray(per_sequence if per_sequence is not None else [], dtype=float)
    if len(sums) > 1 and np.isclose(sums.mean(), total, rtol=1e-6, atol=1e-9):
        half = scipy.stats.t.ppf(0.975, len(sums) - 1) * sums.std(ddof=1) / np.sqrt(len(sums))
        note = f"over {len(sums)} sequences"
    else:
        # All heads have the same sequences, so their errors may be fully correlated: at worst they add up.
        half, note = _LEVEL * float(error.sum()), "errors of all heads added"
    return {
        "statement": "sum",
        "value": total,
        "low": total - half,
        "high": total + half,
        "n": len(effect),
        "note": note,
    }


def _ranks(joined: pd.DataFrame, heads: pd.DataFrame, harm: np.ndarray) -> Iterator[dict[str, Any]]:
    most = int(harm.argmax())
    names = list(map(head_name, joined["layer"], joined["head"]))
    for name in DETECTORS:
        if name not in heads or joined[name].isna().all():
            continue
        scores = joined[name].to_numpy(float)
        if np.isfinite(scores[most]):
            yield _rank("detector_rank", name, heads[name].dropna().to_numpy(float), scores[most], names[most])
        strongest = int(np.nanargmax(scores))
        yield _rank("effect_rank", name, harm, harm[strongest], names[strongest])


def _rank(statement: str, detector: str, values: np.ndarray, own: float, head: str) -> dict[str, Any]:
    """Return the rank of one head's value among `values`, 1 for the largest; p is rank / n."""
    rank, n = int((values > own).sum()) + 1, len(values)
    row = {"statement": statement, "column": detector, "value": rank, "n": n, "note": head}
    return row | {"pvalue": rank / n, "pvalue_floor": 1 / n}


def _correlations(joined: pd.DataFrame, effect: np.ndarray) -> Iterator[dict[str, Any]]:
    for name in (name for name in _CORRELATED if name in joined):
        values = joined[name].to_numpy(float)
        usable = np.isfinite(values)
        x, y, layers = values[usable], effect[usable], joined["layer"].to_numpy()[usable]
        if len(x) < _FEWEST_CORRELATED or np.ptp(x) == 0 or np.ptp(y) == 0:
            continue
        agreement: Any = scipy.stats.spearmanr(x, y)
        value = float(agreement.statistic)
        (low, high), pvalue = jackknife(value, _left_out(x, y, layers), 0.95)
        row = {"statement": "rank_correlation", "column": name, "n": len(x)}
        yield row | {"value": value, "low": low, "high": high, "pvalue": pvalue}


def _left_out(
    x: Float64[np.ndarray, "heads"], y: Float64[np.ndarray, "heads"], layers: np.ndarray
) -> Float64[np.ndarray, "layers"]:
    """Rank correlation without each layer, by the ranks of the whole table; NaN where the others do not vary."""
    ranks = np.stack([scipy.stats.rankdata(x), scipy.stats.rankdata(y)])
    others = [ranks[:, layers != layer] for layer in np.unique(layers)]
    varies = [(pair != pair[:, :1]).any(axis=1).all() for pair in others]
    return np.array([np.corrcoef(pair)[0, 1] if vary else np.nan for pair, vary in zip(others, varies, strict=True)])
