"""The measurements of one checkpoint, and the tables of a history.

Measured are the head table, medians over heads with their null, the in-context score, and K-composition of pairs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from tlspectral.errors import BadHead
from tlspectral.heads import analyze_heads
from tlspectral.heads.composition import COMPOSITION, k_composition
from tlspectral.heads.operator_sketch import operator_sketch
from tlspectral.models.loaders import Source
from tlspectral.models.opening import open_layers
from tlspectral.models.reading import measured
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.reading.view import AttentionView
from tlspectral.positional import positional_symbolic
from tlspectral.positional.swapped_prompts import SCORE_COLUMNS
from tlspectral.selection.heads_as_written import Head, pair_in_table
from tlspectral.tables.head_columns import COLUMNS, HEAD, HEAD_COLUMNS, LATENT_COLUMNS
from tlspectral.tables.html_summary import html_rows
from tlspectral.tables.measurement import bundled
from tlspectral.tables.schema import Column, Schema, columns
from tlspectral.tasks import MetricValue, Task, evaluate, induction
from tlspectral.tasks.block_prompt import BlockPrompt
from tlspectral.tasks.metric_value import standard_error
from tlspectral.tasks.task_sequences import metric_value_of, task_sequences

if TYPE_CHECKING:
    from tlspectral.models.checkpoints.layers import WeightFiles

_PAIR = ["sender_layer", "sender_head", "receiver_layer", "receiver_head"]
_COMPOSITION = ["score", "chance", "rank"]
_LEVEL = 0.95
_MEDIANS = 4000  # number of simulated medians; between seeds the interval's ends move by 1/30 of its width

LayerHead = tuple[int, int]
"""Layer and head."""

PERCENTILES = ("prev", "rope_imag_frac", "dir_frac")
"""Columns for which a history has `<column>_pct`, the percentile within the model at that step."""

_STEP, _FREQUENCY = columns("""
    step      | step  | Training step of the checkpoint; where checkpoints have names instead, the name.
    frequency | index | Rotary pair, 0 being the model's first.
""")
_OF_STEP = "Percentile of {} within the model of that step: rank / n, average ties."


def _medians(name: str) -> tuple[Column, ...]:
    """Return four `Column`s (name, unit and meaning): the median of the head-table column `name` over heads, and low,
    median and high of such medians under the null.

    Their names are `<name>_median`, `<name>_null_low`, `<name>_null_median` and `<name>_null_high`.
    """
    unit = COLUMNS[name].unit
    return columns(f"""
        {name}_median      | {unit} | Median of {name} over the heads of the model.
        {name}_null_low    | {unit} | 2.5 % quantile of such medians under the null.
        {name}_null_median | {unit} | Median of such medians under the null.
        {name}_null_high   | {unit} | 97.5 % quantile of such medians under the null.
    """)


_TABLES = {
    "heads": (
        "",
        (
            *HEAD_COLUMNS,
            *LATENT_COLUMNS,
            *(Column(f"{name}_pct", _OF_STEP.format(name), "share") for name in PERCENTILES),
        ),
    ),
    "summary": (
        "; `.track()` sets it beside a head's own rows",
        (
            *columns("""
                n_heads          | count         | Heads of the model.
                icl_score        | nat per token | Loss on the second copy of repeated random segments less that on the
                                 |               | first. NaN without detectors.
                icl_score_se     | nat per token | Standard error of icl_score over sequences, paired.
                first_copy_loss  | nat per token | Loss on the first copy, positions 1 .. L - 1.
                second_copy_loss | nat per token | Loss on the second copy, positions L + 1 .. 2L - 1.
                value            | of the metric | Score of the model on the task, mean over its sequences. NaN without.
                value_se         | of the metric | Standard error of value over sequences. NaN without a task.
            """),
            *_medians("D_head"),
            *_medians("dir_frac"),
            *_medians("rope_imag_frac")[:1],
            *columns("""
                rope_imag_frac_null_median | share | 1/2 (`population_medians`); NaN without rotary layers.
                D_head_median_by_layer | numbers | D_head_median of the heads of each layer alone. Entry 0 is layer 0;
                                       |         | NaN for a layer without heads.
                D_head_null_low_by_layer       | numbers | D_head_null_low of each layer.
                D_head_null_high_by_layer      | numbers | D_head_null_high of each layer.
                dir_frac_median_by_layer       | numbers | dir_frac_median of each layer.
                rope_imag_frac_median_by_layer | numbers | rope_imag_frac_median of each layer.
            """),
        ),
    ),
    "composition": (
        "",
        (
            *columns("""
                sender_layer   | index | Layer of the earlier head, whose output is read.
                sender_head    | index | Index of the earlier head within its layer.
                receiver_layer | index | Layer of the head that reads.
                receiver_head  | index | Index of the head that reads within its layer.
            """),
            *COMPOSITION,
        ),
    ),
    "positional": (", with `blocks=`", (*HEAD, *SCORE_COLUMNS)),
    "frequencies": (", with `blocks=`", (*HEAD, _FREQUENCY, *SCORE_COLUMNS)),
}
_BY_LAYER = "_by_layer"
HEAD_HISTORY = {
    name: Schema(f"head_history.{name}", (_STEP, *of_table), f"`tls.head_history`: `.{name}`{also}")
    for name, (also, of_table) in _TABLES.items()
}


def measure_step(
    opened: AttentionView | Source,
    pairs: Sequence[tuple[LayerHead, LayerHead]],
    task: Task | None,
    blocks: BlockPrompt | None,
    **options: Any,
) -> pd.DataFrame:
    """Measure one checkpoint and return all its tables, joined into one.

    `opened` is the view of a loaded model, or the `Source` of a model that is read from files. The tables are `heads`,
    `composition` and `sketch` (`operator_sketch`); with `blocks` also `positional` and, on a rotary model,
    `frequencies`. `unbundled` takes them apart. `pairs` are (sender, receiver) pairs of heads whose K-composition is
    measured; `task` is scored; `blocks` are swapped. `options` are keyword arguments of `analyze_heads`. `attrs` are
    the attrs of the head table, `numbers` (in-context score, losses and task value, for the summary) and `shape` (sizes
    of the model). Raises BadHead for a pair that does not exist; ScoreMismatch, UnsupportedArchitecture or BadWeights
    for a model that cannot be read.
    """
    model = opened.model if isinstance(opened, AttentionView) else opened
    with open_layers(model) as layers:
        shape = _shape(layers)
        sketch = operator_sketch(layers)
    score = None if task is None else evaluate(model, task)
    tables = {
        "composition": _composition(model, pairs)
    }  # first: a wrong head is then refused before the null is computed
    tables["sketch"] = sketch
    heads = analyze_heads(model, null_blocks="fresh", **options)
    tables["heads"] = heads.assign(**{f"{name}_pct": heads[name].rank(pct=True) for name in PERCENTILES})
    if blocks is not None:
        tables["positional"] = positional_symbolic(model, blocks, mode="key")
        if any(shape["rotary"]):
            tables["frequencies"] = positional_symbolic(model, blocks, mode="key", per_frequency=True)
    numbers = {} if score is None else {"value": score.value, "value_se": score.se}
    if options["detectors"]:
        first, second = copy_losses(model, induction(seed=options["seed"]))
        difference = second.per_sequence - first.per_sequence
        numbers |= {"icl_score": float(difference.mean()), "icl_score_se": standard_error(difference, first.distinct)}
        numbers |= {"first_copy_loss": first.value, "second_copy_loss": second.value}
    table = bundled(tables)
    shape["heads"] = heads.groupby("layer").size().tolist()
    table.attrs |= heads.attrs | {"numbers": numbers, "shape": shape}
    return table


def _shape(layers: "AttentionView | WeightFiles") -> dict[str, Any]:
    """Return a dict of the sizes of a model that must be equal at all checkpoints of a history: `layers`, `d_model`,
    `d_vocab`, and `rotary` (whether each layer is) or, for weight files, `model_type`.

    `layers` is the model: its view or its weight files.
    """
    shape = {"layers": layers.n_layers, "d_model": layers.d_model}
    if isinstance(layers, AttentionView):
        rotary = [layers.rotary(index) is not None for index in layers.layers]
        return shape | {"d_vocab": layers.d_vocab, "rotary": rotary}
    return shape | {"d_vocab": int(layers.config.vocab_size), "model_type": layers.config.model_type}


def require_order(pairs: Iterable[tuple[LayerHead, LayerHead]]) -> None:
    """Raise ValueError if the sender of a pair is not in an earlier layer than its receiver.

    `pairs` are ((layer, head) of the sender, (layer, head) of the receiver); layers count from 0.
    """
    for pair in pairs:
        if pair[0][0] >= pair[1][0]:
            raise ValueError(
                f"the pair {pair} cannot compose: give (sender, receiver) with the sender in an earlier layer"
            )


def _composition(model: Any, pairs: Sequence[tuple[LayerHead, LayerHead]]) -> pd.DataFrame:
    """Return a table of the K-composition of each (sender, receiver) pair of heads in `pairs`: their layers and heads,
    score, chance and rank.

    `model` is a loaded model, or the `Source` of weight files. Raises BadHead for a head that does not exist,
    ValueError for a sender that is not in an earlier layer.
    """
    with open_layers(model) as source:
        pairs = [(one_head(source, sender), one_head(source, receiver)) for sender, receiver in pairs]
    require_order(pairs)
    receivers = dict.fromkeys(receiver for _, receiver in pairs)
    scores = {end: k_composition(model, end).set_index(["layer", "head"])[_COMPOSITION] for end in receivers}
    rows = []
    for sender, receiver in pairs:
        rows.append((*sender, *receiver, *scores[receiver].loc[sender]))
    return pd.DataFrame(rows, columns=[*_PAIR, *_COMPOSITION]).astype({"rank": np.int64})


def copy_losses(model: Any, task: Task) -> tuple[MetricValue, MetricValue]:
    """Return the model's loss on the first and on the second copy of a repeated random segment, in nats per token.

    `task` is made by `tasks.induction`. Each loss has `.value` (the mean) and `.per_sequence`. With segments of L
    tokens, positions 1 .. L-1 predict the first copy and L+1 .. 2L-1 the second.
    """
    with measured(model) as view:
        second = task_sequences(view, task)
        # Attention is causal: the second copy cannot change the losses of the first, so it is cut off.
        width = second.tokens.shape[1] // 2 + 1
        lengths = torch.full((len(second.tokens),), width)
        first = replace(second, tokens=second.tokens[:, :width], lengths=lengths, predicted=slice(1, width - 1))
        return metric_value_of(view, first), metric_value_of(view, second)


def population_medians(heads: pd.DataFrame, *, seed: int = 0) -> dict[str, float]:
    """Return medians over the heads of a model, and the distribution of such medians under the null.

    For D_head and dir_frac, each head is drawn independently from a normal distribution with the mean and standard
    deviation of its own null; `_null_low` and `_null_high` hold 95 % of the simulated medians. For rope_imag_frac the
    null median is 1/2: rotating the pairs of a random W_K by 90 degrees swaps Re M_t and Im M_t and changes nothing
    else.

    Args:
        heads: the head table of one model, with `D_head`, `dir_frac`, `rope_imag_frac`, and `_null_mean`, `_null_std`
            of the first two.
        seed: seed of the simulated medians.

    Returns:
        dict with `D_head_median`, `D_head_null_median`, `D_head_null_low`, `D_head_null_high`, the same for `dir_frac`,
        and `rope_imag_frac_median`, `rope_imag_frac_null_median`; NaN where a model has no such number.

    Source: "Fingerprint, Not Blueprint" (FP), sections 3 and 9, draws one constant null; here the null follows the
    singular values at each step.

    Not established: an exact level. Heads that share keys or were trained together are not independent, so the true
    spread is wider.
    """
    medians: dict[str, float] = {}
    # Without dropna, pandas 2 warns of a column that is empty.
    for column in ("D_head", "dir_frac"):
        medians[f"{column}_median"] = float(heads[column].dropna().median())
        medians |= _null_of_median(column, heads, seed)
    phase = float(heads["rope_imag_frac"].dropna().median())
    medians["rope_imag_frac_median"] = phase
    medians["rope_imag_frac_null_median"] = float("nan") if np.isnan(phase) else 0.5
    return medians


def medians_by_layer(heads: pd.DataFrame, *, seed: int = 0) -> dict[str, list[float]]:
    """Return `population_medians` of the heads of each layer alone, a list by layer for each `_by_layer` column.

    `heads` is the head table of one model, `seed` the seed of the simulated medians. Entry i is layer i; NaN for a
    layer without heads. A median over all layers mixes layers that form early and late.
    """
    names = [column.name for column in HEAD_HISTORY["summary"].columns if column.name.endswith(_BY_LAYER)]
    of_layer = {layer: population_medians(table, seed=seed) for layer, table in heads.groupby("layer")}
    layers = range(int(heads["layer"].max()) + 1)
    return {
        name: [of_layer.get(layer, {}).get(name.removesuffix(_BY_LAYER), float("nan")) for layer in layers]
        for name in names
    }


def _null_of_median(column: str, heads: pd.DataFrame, seed: int) -> dict[str, float]:
    """Return a dict with `<column>_null_low`, `_null_median`, `_null_high`: quantiles 2.5 %, 50 % and 97.5 % of
    simulated medians over heads.

    `heads` is a head table with `<column>_null_mean` and `<column>_null_std`. Each head is drawn from a normal
    distribution with its null mean and standard deviation; `seed` fixes the draws. NaN without a null.
    """
    moments = [f"{column}_null_mean", f"{column}_null_std"]
    null_moments = heads.loc[heads[column].notna(), moments].dropna().to_numpy(dtype=float)
    names = [f"{column}_null_low", f"{column}_null_median", f"{column}_null_high"]
    if len(null_moments) == 0:
        return dict.fromkeys(names, float("nan"))
    drawn = np.random.default_rng(seed).normal(*null_moments.T, size=(_MEDIANS, len(null_moments)))  # medians heads
    quantiles = np.quantile(np.median(drawn, axis=1), [(1 - _LEVEL) / 2, 0.5, (1 + _LEVEL) / 2])
    return dict(zip(names, quantiles.tolist(), strict=True))


@dataclass(frozen=True, repr=False)
class HeadHistory:
    """The result of `tls.head_history`: DataFrames with a column `step`, the label of the checkpoint.

        history = tls.head_history("EleutherAI/pythia-70m", folder="pythia")  # "pythia": keeps results
        history.summary[["step", "icl_score", "D_head_median"]]
        history.track("L3H1")  # one head over the steps

    A history is not a table itself: `history["prev"]` raises TypeError and names the table. `heads.attrs` hold the
    settings and, in `checkpoints`, the weights of each step.

    Attributes:
        heads: a row per head and step: the columns of `analyze_heads`, and `prev_pct, rope_imag_frac_pct,
            dir_frac_pct`, percentiles within the model of that step (rank / n).
        summary: a row per step. Columns of `head_history.summary`: `step, n_heads, icl_score, icl_score_se,
            first_copy_loss, second_copy_loss, value, value_se, D_head_median, D_head_null_low, D_head_null_median,
            D_head_null_high, dir_frac_median, dir_frac_null_low, dir_frac_null_median, dir_frac_null_high,
            rope_imag_frac_median, rope_imag_frac_null_median, D_head_median_by_layer, D_head_null_low_by_layer,
            D_head_null_high_by_layer, dir_frac_median_by_layer, rope_imag_frac_median_by_layer`. Losses and `icl_score`
            (second copy less first) are nats per token; `_null_low` to `_null_high` hold 95 % of the medians of random
            heads; `_by_layer` columns have lists with an entry per layer.
        composition: a row per pair and step, with the K-composition score of sender and receiver; no rows without
            pairs. Columns of `head_history.composition`: `step, sender_layer, sender_head, receiver_layer,
            receiver_head, score, chance, rank`.
        positional: a row per head and step, from `positional_symbolic(mode="key")` on `blocks`; None without blocks.
        frequencies: `positional` by rotary frequency; None without blocks or rotary positions.
    """

    heads: pd.DataFrame
    summary: pd.DataFrame
    composition: pd.DataFrame
    positional: pd.DataFrame | None = None
    frequencies: pd.DataFrame | None = None

    def __getitem__(self, key: Any) -> Any:
        """Raise TypeError, because a history has several tables; the message names those that have the column `key`, as
        `history.heads['prev']`.
        """
        tables = {name: table for name, table in vars(self).items() if isinstance(table, pd.DataFrame)}
        matching = [f"history.{name}[{key!r}]" for name, table in tables.items() if key in [*table.columns]]
        shown = " or ".join(matching) or ", ".join(f"history.{name}" for name in tables)
        advice = f"give {shown}" if matching else f"its tables are {shown}: give one of them"
        raise TypeError(f"a HeadHistory has several tables and is not a table itself: {advice}")

    @property
    def steps(self) -> list[Any]:
        """The labels of the checkpoints, a list: training steps, rising, or names in the given order."""
        return self.summary["step"].tolist()

    @property
    def previous_token_head(self) -> LayerHead:
        """The (layer, head) with the largest `prev` (mean attention to the previous token) at the last step. Raises
        ValueError if the detectors were not run.
        """
        last = self.heads.loc[self.heads["step"] == self.steps[-1]]
        if last["prev"].isna().all():
            raise ValueError("the detectors were not run (detectors=False): give a head, such as history.track((0, 3))")
        row = last.loc[last["prev"].idxmax()]
        return int(row["layer"]), int(row["head"])

    def track(self, head: Head = None) -> pd.DataFrame:
        """Return a DataFrame with one row per step: a head's columns of `heads` joined with the columns of `summary`.

        Args:
            head: "L0H3", (0, 3) or a table row. Default: `previous_token_head`, the largest `prev` at the last step.

        Raises:
            BadHead: the head does not exist.
            ValueError: no head is given and the detectors were not run.
        """
        if head is None:
            head = self.previous_token_head
        layer, index = pair_in_table(head, self.heads, "this history")
        head_rows = self.heads.loc[(self.heads["layer"] == layer) & (self.heads["head"] == index)]
        if head_rows.empty:
            raise BadHead(f"L{layer}H{index} does not exist in this history: give a head of history.heads")
        return head_rows.merge(self.summary, on="step", validate="one_to_one")

    def __repr__(self) -> str:
        return "\n".join(["HeadHistory", *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return html_rows("Head history", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        """Return (name, text) pairs that summarise the history: model, steps, medians, previous-token head, in-context
        score.
        """
        steps, first, last = self.steps, self.summary.iloc[0], self.summary.iloc[-1]
        rows = [
            ("model", str(self.heads.attrs.get("model", "several"))),
            ("steps", f"{len(steps)}, from {steps[0]} to {steps[-1]}; heads: {int(last['n_heads'])}"),
            (
                "median D_head",
                f"{first['D_head_median']:.3f} first, {last['D_head_median']:.3f} last (95 % of medians under the last "
                f"null: {last['D_head_null_low']:.3f} to {last['D_head_null_high']:.3f})",
            ),
        ]
        if not np.isnan(last["icl_score"]):
            layer, head = self.previous_token_head
            prev = self.track((layer, head))["prev"]
            rows += [
                ("previous-token head", f"L{layer}H{head}: prev {prev.iloc[0]:.2f} first, {prev.iloc[-1]:.2f} last"),
                ("in-context score", f"{first['icl_score']:.2f} first, {last['icl_score']:.2f} last (nats per token)"),
            ]
        return rows
