"""The tables of `head_history`, and the rows of one head in them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.errors import BadHead
from tlspectral.selection import head_pair
from tlspectral.tables.html_summary import html_rows

Head = tuple[int, int]


@dataclass(frozen=True, repr=False)
class HeadHistory:
    """The result of `head_history`. `heads.attrs` hold the settings, and in `checkpoints` the weights of each step.

    Attributes:
        heads: `step`, the columns of `analyze_heads`, and `prev_pct, rope_imag_frac_pct, dir_frac_pct` beside its
            `D_head_pct`: percentiles within the model of that step (`within_model_percentile`).
        summary: per step `n_heads`; `icl_score, icl_score_se, first_copy_loss, second_copy_loss` (`in_context_score`,
            NaN without detectors); and the medians of `population_medians` with their nulls.
        composition: per step and pair of heads `sender_layer, sender_head, receiver_layer, receiver_head`, then `score,
            chance, rank` of `k_composition`; no rows without pairs.
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
