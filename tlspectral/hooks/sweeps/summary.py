"""`summarize_sweep`: sums, ranks and correlations of effects, as in "Fingerprint, Not Blueprint" (sections 5 and 8)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64

from tlspectral.errors import earlier_calls
from tlspectral.errors.settings import checked_settings
from tlspectral.heads.detectors import DETECTORS
from tlspectral.heads.likeness import TWINS
from tlspectral.selection.node_names import head_name
from tlspectral.stats.correlations import benjamini_hochberg
from tlspectral.stats.jackknife import jackknife
from tlspectral.tables.head_columns import PART
from tlspectral.tables.meanings import MEANINGS, followed, warn_of_older
from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import Schema, columns, require, require_table

_SMALL_EFFECT = {"induction": 0.01, "language": 0.01}  # nats, by task
_CORRELATED = ("dir_frac", "D_head", "rope_imag_frac", "prev")
_FEWEST_CORRELATED = 20  # heads
_LEVEL = 1.959964  # two-sided 95 %

SUMMARIZE_SWEEP = Schema(
    "summarize_sweep",
    (
        PART,
        *columns("""
            size_control | label        | none, score_rms (effect divided by the RMS removed) or random (effect minus
                         |              | the effect of a random part).
            statement    | label        | sum, share_small, detector_rank, effect_rank, rank_correlation or twin.
            column       | label        | Column of the head table in a rank or correlation, qk for twins; else missing.
            value        | by statement | Metric (per logit under score_rms), share, rank from 1, correlation or
                         |              | likeness.
            low          | as value     | Lower end of a 95 % interval: for sum over sequences; for share_small with
                         |              | all effects moved by 1.96 standard errors; for correlations over layers
                         |              | (three or more). NaN for ranks.
            high         | as value     | Upper end of the interval.
            pvalue       | probability  | For ranks rank / n, exact for a head chosen at random; for correlations
                         |              | Student's t over layers; else NaN.
            pvalue_floor | probability  | Smallest possible pvalue of a rank, 1 / n; else NaN.
            qvalue       | probability  | pvalue of correlations, corrected for their number (Benjamini-Hochberg).
            n            | count        | Number of measured heads or sets; for ranks, of those ranked; for twins, of
                         |              | heads with a small effect.
            note         | text         | For sum, the data of its interval; for ranks, the head; for twins, the head
                         |              | with a small effect and its twin; else missing.
        """),
    ),
    "`tls.hooks.summarize_sweep`",
)


@earlier_calls(heads="table")
@checked_settings
def summarize_sweep(
    sweep: pd.DataFrame | Sequence[pd.DataFrame],
    table: pd.DataFrame,
    *,
    small: float | None = None,
    likeness: pd.DataFrame | None = None,
) -> pd.DataFrame:
    """Summarise sweeps: sums of effects, ranks of heads, and correlations with columns of the head table.

    Use it to compare parts, and to see whether the head that matters most is the head that a detector finds.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> sweep = tls.ablation_sweep(model, "rope_phase")
    >>> summary = tls.hooks.summarize_sweep(sweep, tls.detect_heads(model))
    >>> [str(entry) for entry in summary.loc[2, ["statement", "column", "note", "value"]]]
    ['detector_rank', 'prev', 'L0H3', '1.0']

    Each row is a `statement` about the effects (`delta`) of one part:

    * `sum`: sum of the effects of all heads, in units of the metric.
    * `share_small`: share of heads with an absolute effect below `small`.
    * `detector_rank`: take the head whose ablation does the most harm; its rank by the detector score `prev`, `dup` or
      `ind` (1 is the largest) among all heads. `note` names the head.
    * `effect_rank`: take the head with the largest `prev`, `dup` or `ind`; its rank by harm among measured heads.
    * `rank_correlation`: Spearman's, of the effect with `dir_frac`, `D_head`, `rope_imag_frac`, `prev` (from 20 heads).
    * `twin`, with `likeness`: a head with a small effect and a twin (likeness above .5), which may stand in for it.

    `size_control` says how effects are scaled: `none`; `score_rms`, divided by the RMS removed, to compare parts of
    different size; `random`, minus the effect of a random part (needs `control="random"`).

    Args:
        sweep: a table of `ablation_sweep`, or a list of them. A set's detector score is the largest of its heads.
        table: table of `analyze_heads` for the same model (or of `detect_heads`), with every head of the sweep.
        small: effects below this are small, in the unit of the metric. Default: 0.01 nats for the tasks "induction" and
            "language"; other tasks need it.
        likeness: table of `tls.head_likeness(model)`, for the statement `twin`.

    Returns:
        DataFrame, a row per statement. Columns: `part, size_control, statement, column, value, low, high, pvalue,
        pvalue_floor, qvalue, n, note`. `low, high`: 95 % interval. `pvalue` of a rank is rank / n (head chosen at
        random), of a correlation by Student's t over layers; `qvalue` corrects it for the number of correlations.

    Raises ValueError for a table that does not fit the sweep, and if `small` or the task's direction is missing.

    Not established: that a column predicts which head matters, or that twins replace each other. If neighbouring layers
    are alike, `pvalue` of a correlation rejects 10.4 % at nominal 5 %. More: docs/statistics.md
    """
    require_table(table, "give the result of tls.analyze_heads")
    if likeness is not None:
        require(likeness, ("a", "b", "qk"), "head_likeness", name="likeness")
    tables: list[Any] = list(sweep) if isinstance(sweep, list | tuple) else [sweep]
    rows: list[dict[str, Any]] = []
    for one_part in tables:
        require_table(one_part, "give the result of tls.ablation_sweep, or a list of them", name="sweep")
        require_same_model(table, one_part.attrs, "the sweep's effects")
        warn_of_older(one_part, "the sweep")
        (what_is_small, harm), parts = _scale(one_part.attrs, small), one_part["part"].unique()
        for part in parts:
            measured = one_part.loc[(one_part["part"] == part) & one_part["delta"].notna()].reset_index(drop=True)
            measured, of_all = _named(part, measured, table, one_part.attrs.get("sets"))
            rows += _part_rows(part, measured, of_all, one_part.attrs if len(parts) == 1 else {}, what_is_small, harm)
            if likeness is not None and "sets" not in one_part.attrs:
                rows += _twin_rows(part, measured, likeness, what_is_small)
    if not rows:
        raise ValueError("the sweep has no measured effect (column delta): give a table of tls.ablation_sweep")
    summary = pd.DataFrame(rows, columns=[column.name for column in SUMMARIZE_SWEEP.columns])
    pvalues = summary["pvalue"].where(summary["statement"] == "rank_correlation")
    summary["qvalue"] = benjamini_hochberg(pvalues.to_numpy(float)).q
    return SUMMARIZE_SWEEP.frame(summary, {MEANINGS: min(followed(one_part.attrs) for one_part in tables)})


def _named(
    part: str, measured: pd.DataFrame, table: pd.DataFrame, sets: Mapping[str, list[str]] | None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Add a column `name` to the rows of a sweep, and return them with a table of all heads, or of all sets, by name.

    `measured` are the rows of the part named `part` that have an effect. `table` is the head table. `sets` is a dict
    from the name of a set to the names of its heads; None for a sweep of heads. The table of sets has, for each
    detector, the largest score of a set's heads. Raises ValueError if a head or set is twice in the sweep, or if the
    head table lacks a head of the sweep or of a set.
    """
    heads = table.assign(name=list(map(head_name, table["layer"], table["head"])))
    if sets is None:
        measured = measured.assign(name=list(map(head_name, measured["layer"], measured["head"])))
    if measured["name"].duplicated().any():
        what = "head" if sets is None else "set"
        raise ValueError(f"{part}: a {what} is in the sweep twice: give tables of different sweeps as a list")
    known = {*heads["name"]}
    for name in measured["name"] if sets is None else chain(*sets.values()):
        if name not in known:
            raise ValueError(f"the head table lacks {name} of the sweep: give the table of the whole model")
    if sets is None:
        return measured, heads
    detectors = heads.set_index("name").reindex(columns=[name for name in DETECTORS if name in heads])
    return measured, pd.DataFrame([{"name": name, **detectors.loc[of_set].max()} for name, of_set in sets.items()])


def _twin_rows(part: str, measured: pd.DataFrame, likeness: pd.DataFrame, small: float) -> Iterator[dict[str, Any]]:
    """Yield a row of `twin`, as a dict, for each head with an effect below `small` and each of its twins.

    `part` is the name of the part, `measured` has its heads with an effect, `likeness` the pairs of `head_likeness`.
    """
    names = measured["name"].tolist()
    few = {name for name, effect in zip(names, measured["delta"], strict=True) if abs(effect) < small}
    twins = likeness.loc[likeness["qk"] > TWINS, ["a", "b", "qk"]].drop_duplicates()
    pairs = {(a, b): qk for a, b, qk in twins.itertuples(index=False)}
    pairs |= {(b, a): qk for (a, b), qk in pairs.items()}
    row = {"part": part, "size_control": "none", "statement": "twin", "column": "qk", "n": len(few)}
    for name in (name for name in names if name in few):
        for (_, twin), qk in ((pair, qk) for pair, qk in pairs.items() if pair[0] == name):
            yield row | {"value": qk, "note": f"{name}, twin {twin}"}


def _scale(attrs: Any, small: float | None) -> tuple[float, int]:
    """Return the bound of a small effect in units of the metric, and 1 if a higher metric is worse, else -1.

    `attrs` are the attrs of a sweep, `small` the user's bound or None. Raises ValueError if the attrs do not name the
    task or say whether a higher value is better, or `small` has no default for the task.
    """
    if "task" not in attrs:
        raise ValueError("the sweep has no attrs['task'] (pd.concat drops attrs): give the sweeps as a list of tables")
    task, higher_is_better = attrs["task"], attrs.get("higher_is_better")
    if higher_is_better is None:
        raise ValueError(
            f"the sweep's task ({task}) does not say whether a higher value is better, so harm cannot be ranked: sweep "
            "with tls.Task(..., higher_is_better=True or False)"
        )
    if small is None and task not in _SMALL_EFFECT:
        raise ValueError(f"small= has no default for the task {task}: give the bound of a small effect in its unit")
    return _SMALL_EFFECT[task] if small is None else small, -1 if higher_is_better else 1


def _part_rows(
    part: str, measured: pd.DataFrame, heads: pd.DataFrame, attrs: Any, small: float, harm: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the summary for one part, as dicts from column to value.

    Statements: `sum`, `share_small`, `detector_rank`, `effect_rank` and `rank_correlation`, for each size control.
    `part` is the name of the part, `measured` has its heads or sets with an effect, `heads` is the table of all heads
    or sets, `attrs` are the attrs of the sweep. `small` is the bound of a small effect, `harm` 1 if a higher metric is
    worse, else -1.
    """
    joined = measured.merge(heads, on="name", how="left", suffixes=("", "_of_heads"))
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
        correlations = _correlations(usable_heads, effect[usable]) if "layer" in heads else ()
        for statement in chain(ranks, correlations):
            yield start | statement


def _effects(joined: pd.DataFrame) -> Iterator[tuple[str, str, np.ndarray, np.ndarray]]:
    """Yield (size control, name of its sums in attrs, effect of each head, standard errors), three times at most.

    The effects are `delta`, `delta` per RMS of the removed part, and `delta` minus the mean effect of the random
    controls; the last is left out without random controls. `joined` is the sweep joined with the head table.
    """
    delta, error = joined["delta"].to_numpy(float), joined["delta_se"].to_numpy(float)
    yield "none", "delta", delta, error
    size = joined["score_rms"].to_numpy(float)
    size = np.where(size > 0, size, np.nan)
    yield "score_rms", "delta_per_rms", delta / size, error / size
    if "control_delta" in joined and joined["score_rms"].notna().any():  # without score_rms the control is other heads
        above = delta - joined["control_delta"].to_numpy(float)
        yield "random", "delta_above_control", above, np.hypot(error, joined["control_delta_se"].to_numpy(float))


def _sum(effect: np.ndarray, error: np.ndarray, per_sequence: Sequence[float] | None) -> dict[str, Any]:
    """Return the row of the statement `sum` as a dict: the sum of effects over heads and a 95 % interval.

    Keys: `statement, value, low, high, n, note`. `effect` and `error` are the effect of each head and its standard
    error. `per_sequence` has the sum on each sequence, or is None. If its mean is the sum of `effect`, the interval is
    a t interval over sequences; otherwise 1.96 times the sum of the standard errors `error`.
    """
    total = float(effect.sum())
    sums = np.asarray(per_sequence if per_sequence is not None else [], dtype=float)
    if len(sums) > 1 and np.isclose(sums.mean(), total, rtol=1e-6, atol=1e-9):
        half = scipy.stats.t.ppf(0.975, len(sums) - 1) * sums.std(ddof=1) / np.sqrt(len(sums))
        note = f"over {len(sums)} sequences"
    else:
        # All heads are measured on the same sequences, so their errors may be fully correlated and add up.
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
    """Yield the rows of `detector_rank` and `effect_rank` for each detector, as dicts.

    `joined` has the measured heads with their detector scores, `heads` all heads. `harm` is the harm of ablating each
    head of `joined` (the effect, positive if worse).
    """
    most = int(harm.argmax())
    names = joined["name"].tolist()
    for name in DETECTORS:
        if name not in heads or joined[name].isna().all():
            continue
        scores = joined[name].to_numpy(float)
        if np.isfinite(scores[most]):
            yield _rank("detector_rank", name, heads[name].dropna().to_numpy(float), scores[most], names[most])
        strongest = int(np.nanargmax(scores))
        yield _rank("effect_rank", name, harm, harm[strongest], names[strongest])


def _rank(statement: str, detector: str, values: np.ndarray, own: float, head: str) -> dict[str, Any]:
    """Return the row of a rank as a dict: the place of `own` among `values` (1 is the largest), with p = rank / n.

    Keys: `statement, column, value, n, note, pvalue, pvalue_floor`. `statement` and `detector` name the row, `head` the
    head that is ranked.
    """
    rank, n = int((values > own).sum()) + 1, len(values)
    row = {"statement": statement, "column": detector, "value": rank, "n": n, "note": head}
    return row | {"pvalue": rank / n, "pvalue_floor": 1 / n}


def _correlations(joined: pd.DataFrame, effect: np.ndarray) -> Iterator[dict[str, Any]]:
    """Yield a row of `rank_correlation`, as a dict, for each of the columns dir_frac, D_head, rope_imag_frac and prev.

    The row has Spearman's correlation of the column of `joined` with `effect`, its 95 % interval and two-sided p by a
    jackknife over layers (Student's t). `effect` is the effect of each head (row of `joined`). A column is left out if
    fewer than 20 heads have a value or it is constant.
    """
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
    """Return the rank correlation of x and y without each layer in turn; NaN if the rest is constant.

    The result has one number per layer. Ranks are taken once, over the whole table. `x` and `y` have a number per head,
    `layers` is the layer of each head.
    """
    ranks = np.stack([scipy.stats.rankdata(x), scipy.stats.rankdata(y)])
    others = [ranks[:, layers != layer] for layer in np.unique(layers)]
    varies = [(pair != pair[:, :1]).any(axis=1).all() for pair in others]
    return np.array([np.corrcoef(pair)[0, 1] if vary else np.nan for pair, vary in zip(others, varies, strict=True)])
