"""How much of an attenuation by rotary phase a placebo reaches as well."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral import stats
from tlspectral.tables.draws import tables_with_draws
from tlspectral.tables.html_summary import html_summary


@dataclass(frozen=True)
class PlaceboAttenuation:
    """An attenuation beside those of its placebos.

    Attributes:
        statistic: share of the association that the model's own phase features take away, 1 - after / before.
        draws: the same share for every draw of the placebo.
        pvalue: (1 + number of draws at or above `statistic`) / (n + 1).
        n: draws.
        seed: of the draws, None where none were random.
        method: the placebo.
        reason: why a number is NaN, else None.
    """

    _repr_html_ = html_summary

    statistic: float
    draws: Float64[np.ndarray, " n"]
    pvalue: float
    n: int
    seed: int | None
    method: str
    reason: str | None


def placebo_attenuation(
    heads: pd.DataFrame, placebo: pd.DataFrame, attenuation: Callable[[pd.DataFrame], Any] = stats.attenuation
) -> PlaceboAttenuation:
    """Compare an attenuation by RoPE-phase controls with what placebo phase features do (FP section 7, Table 3).

    Args:
        heads: table of `analyze_heads`.
        placebo: table of `permuted_pairing` or `pseudo_rope`, of the same model.
        attenuation: a function of a head table whose result has `.statistic`; give other options of
            `tlspectral.stats.attenuation` by `functools.partial(attenuation, method="rank")`.

    Returns:
        The attenuation, the placebos' and a one-sided p-value, which no number of draws brings below 1 / (n + 1). Of a
        model without RoPE `statistic` and `pvalue` are NaN, and the placebo's own attenuation is in `draws`.

    Raises:
        ValueError: the two tables are not of the same model or heads.

    What it does not establish: causal mediation. All columns are functions of the same weights. A large p-value says
    that pairing and frequency add nothing beyond membership in the rotary block, not that the phase is unused.
    """
    own, reason = np.nan, "the model has no RoPE, so no phase features of its own"
    if heads["rope_imag_frac"].notna().any():
        own, reason = float(attenuation(heads).statistic), None
    drawn = np.array([float(attenuation(table).statistic) for table in tables_with_draws(heads, placebo)])
    if reason is None and not np.isfinite([own, *drawn]).all():
        reason = f"the attenuation is not finite in {int((~np.isfinite(drawn)).sum())} of {len(drawn)} draws, or itself"
    pvalue = (1 + int((drawn >= own).sum())) / (len(drawn) + 1) if reason is None else np.nan
    return PlaceboAttenuation(
        statistic=own,
        draws=drawn,
        pvalue=float(pvalue),
        n=len(drawn),
        seed=placebo.attrs.get("seed"),
        method=str(placebo.attrs.get("placebo", "placebo")),
        reason=reason,
    )
