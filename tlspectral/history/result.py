"""The tables of `head_history`, and the rows of one head in them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.errors import BadHead
from tlspectral.heads.composition import COMPOSITION
from tlspectral.positional.measure import SCORE_COLUMNS
from tlspectral.selection import head_pair
from tlspectral.tables.head_columns import COLUMNS, HEAD, HEAD_COLUMNS, LATENT_COLUMNS
from tlspectral.tables.html_summary import html_rows
from tlspectral.tables.schema import Column, Schema, columns

Head = tuple[int, int]

PERCENTILES = ("prev", "rope_imag_frac", "dir_frac")
"""Columns of which a history holds the percentile within the model, as `<column>_pct`, as the head table of D_head."""

_STEP, _FREQUENCY = columns("""
    step      | step  | Training step of the checkpoint; where checkpoints have names instead, the name.
    frequency | index | Rotary pair, 0 being the model's first.
""")
_OF_STEP = "Percentile of {} within the model of that step: rank / n, average ties."


def _medians(name: str) -> tuple[Column, ...]:
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
            *columns("rope_imag_frac_null_median | share | 1/2 (`population_medians`); NaN without rotary layers."),
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
HEAD_HISTORY = {
    name: Schema(f"head_history.{name}", (_STEP, *of_table), f"`tls.head_history`: `.{name}`{also}")
    for name, (also, of_table) in _TABLES.items()
}


@dataclass(frozen=True, repr=False)
class HeadHistory:
    """The result of `head_history`. `heads.attrs` hold the settings, and in `checkpoints` the weights of each step.

    Attributes:
        heads: `step`, the columns of `analyze_heads`, and `prev_pct, rope_imag_frac_pct, dir_frac_pct` beside its
            `D_head_pct`: percentiles within the model of that step, rank / n.
        summary: a row per step. Columns of `head_history.summary`: `step, n_heads, icl_score, icl_score_se,
            first_copy_loss, second_copy_loss, value, value_se, D_head_median, D_head_null_low, D_head_null_median,
            D_head_null_high, dir_frac_median, dir_frac_null_low, dir_frac_null_median, dir_frac_null_high,
            rope_imag_frac_median, rope_imag_frac_null_median`.
        composition: `k_composition` of each step and pair of heads; no rows without pairs. Columns of
            `head_history.composition`: `step, sender_layer, sender_head, receiver_layer, receiver_head, score, chance,
            rank`.
        positional: per step the table of `positional_symbolic(mode="key")` on the history's `blocks`; None without.
        frequencies: the same per rotary frequency; None without, and for models without rotary positions.
    """

    heads: pd.DataFrame
    summary: pd.DataFrame
    composition: pd.DataFrame
    positional: pd.DataFrame | None = None
    frequencies: pd.DataFrame | None = None

    @property
    def steps(self) -> list[Any]:
        """The steps, rising; or the names of the checkpoints, in the order given."""
        return self.summary["step"].tolist()

    @property
    def previous_token_head(self) -> Head:
        """Layer and head with the largest `prev` at the last step: in hindsight. ValueError without detectors."""
        last = self.heads.loc[self.heads["step"] == self.steps[-1]]
        if last["prev"].isna().all():
            raise ValueError("the detectors were not run (detectors=False): name a head as (layer, head) instead")
        row = last.loc[last["prev"].idxmax()]
        return int(row["layer"]), int(row["head"])

    def track(self, head: Head | None = None) -> pd.DataFrame:
        """One row per step: a head's row beside the step's summary, as figures and questions take it.

        Args:
            head: (layer, head); None for `previous_token_head`.

        Raises:
            BadHead: there is no such head.
        """
        layer, index = self.previous_token_head if head is None else head_pair(head)
        head_rows = self.heads.loc[(self.heads["layer"] == layer) & (self.heads["head"] == index)]
        if head_rows.empty:
            raise BadHead(f"there is no head {index} in layer {layer} of this history")
        return head_rows.merge(self.summary, on="step", validate="one_to_one")

    def __repr__(self) -> str:
        return "\n".join(["HeadHistory", *(f"  {name}: {text}" for name, text in self._rows())])

    def _repr_html_(self) -> str:
        return html_rows("Head history", self._rows())

    def _rows(self) -> list[tuple[str, str]]:
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
