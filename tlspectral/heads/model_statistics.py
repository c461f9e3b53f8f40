"""The statistics of Tables 2 and 3 of "Fingerprint, Not Blueprint" (FP), for a model that the paper does not have."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

from tlspectral.heads.noise import statistic_noise, weight_noise_draws
from tlspectral.heads.placebos import permuted_pairing, placebo_attenuation, pseudo_rope
from tlspectral.heads.same_model import require_table_of
from tlspectral.heads.statistics_columns import ANOTHER_MODEL
from tlspectral.stats import (
    PartialCorrelation,
    attenuation,
    hypergeometric_overlap,
    layer_bootstrap,
    partial_spearman,
    top_head_percentile,
)
from tlspectral.stats.correlations import Method
from tlspectral.stats.values import reasons_as_objects
from tlspectral.tables import named

_METHODS: tuple[Method, ...] = ("hybrid", "rank")
_WITHIN = "partial correlation within layers"


@dataclass(frozen=True)
class _Row:
    """A row of the table, with the defaults of the columns that a statistic lacks."""

    statistic: str
    method: str
    value: float
    n: int
    function: str
    interval: tuple[float, float] = (math.nan, math.nan)
    pvalue: float = math.nan
    pvalue_of: str | None = None
    reason: str | None = None


def another_model(
    heads: pd.DataFrame,
    *,
    model: Any = None,
    k: int = 5,
    bootstrap_draws: int = 2000,
    placebo_draws: int = 50,
    noise_draws: int = 20,
    seed: int = 0,
    show_progress: bool = False,
) -> pd.DataFrame:
    """Compute the statistics of FP's Tables 2 and 3 for a model, with intervals, placebos and the noise of rounding.

    Args:
        heads: table of `analyze_heads` with detectors.
        model: the loaded model of that table; None leaves out placebos and rounding.
        k: previous-token heads whose percentile is taken; odd, so that a median is one of them.
        bootstrap_draws: resamples of layers.
        placebo_draws: permuted pairings of rotary columns; a model without RoPE has one pseudo-RoPE instead.
        noise_draws: perturbations of query and key weights within the rounding they are stored with.
        seed: of all draws.
        show_progress: a bar over perturbed layers.

    Returns:
        DataFrame, one row per statistic: `statistic, method, value, low, high` (95 %, layers resampled), `pvalue` and
        `pvalue_of` (what it tests), `noise_sd` (over rounding), `n, function, reason`. Statistics: the partial
        correlation of D_head and prev given dir_frac; the same among heads of one layer; the median D_head percentile
        of the top k; the share of the partial correlation that RoPE-phase controls take; and that share under the
        placebo (mean of its draws).

    Raises:
        ValueError: columns are missing, k is even, or model and table do not belong together.

    What it does not establish: anything about a positional scheme: one model is one model. Heads of a layer depend on
    each other, so the p-value of k random heads is too small where the top heads share layers.
    """
    if k % 2 == 0:
        raise ValueError(f"k={k} is even: the median of an odd number of heads is one of them, give an odd k")
    if model is not None:
        require_table_of(model, heads)
    rotary = "rope_imag_frac" in heads and bool(heads["rope_imag_frac"].notna().any())
    rows = [_partial(heads, method, bootstrap_draws, seed) for method in _METHODS]
    rows += [_within_layers(heads, method) for method in _METHODS]
    rows.append(_percentile(heads, k))
    shares: dict[str, Callable[[pd.DataFrame], Any]] = {
        method: partial(attenuation, method=method, draws=0, seed=seed) for method in _METHODS
    }
    if rotary:
        rows += [_attenuation(heads, method, bootstrap_draws, seed) for method in _METHODS]
    if model is not None:
        placebo = permuted_pairing(model, draws=placebo_draws, seed=seed) if rotary else pseudo_rope(model)
        rows += [_placebo(heads, placebo, method, shares[method]) for method in _METHODS]
    table = pd.DataFrame(rows)
    table["low"], table["high"] = zip(*table["interval"], strict=True)
    table["noise_sd"] = math.nan
    if model is not None:
        perturbed = weight_noise_draws(model, draws=noise_draws, seed=seed, show_progress=show_progress)
        statistics: dict[str, Callable[[pd.DataFrame], float]] = {
            f"top-{k} percentile of D_head/median": lambda moved: top_head_percentile(moved, k=k).statistic
        }
        for method in _METHODS:
            statistics[f"partial correlation/{method}"] = partial(_partial_alone, method=method)
            statistics[f"{_WITHIN}/{method}"] = lambda moved, method=method: (
                _partial_within_layers(moved, method).statistic
            )
            if rotary:
                statistics[f"attenuation/{method}"] = partial(_share_alone, share=shares[method])
        spread = statistic_noise(heads, perturbed, statistics).set_index("statistic")["sd"]
        table["noise_sd"] = (table["statistic"] + "/" + table["method"]).map(spread)
    columns = ["statistic", "method", "value", "low", "high", "pvalue", "pvalue_of", "noise_sd", "n"]
    table = reasons_as_objects(table.reindex(columns=[*columns, "function", "reason"]))
    table.attrs = {
        "model": heads.attrs.get("model"),
        "seed": seed,
        "bootstrap_draws": bootstrap_draws,
        "placebo_draws": placebo_draws if rotary else 1,
        "noise_draws": noise_draws if model is not None else 0,
    }
    return named(table, ANOTHER_MODEL)


def _partial(heads: pd.DataFrame, method: Method, draws: int, seed: int) -> _Row:
    bootstrap = layer_bootstrap(heads, method=method, draws=draws, seed=seed)
    return _Row(
        "partial correlation",
        method,
        bootstrap.statistic,
        interval=bootstrap.interval,
        pvalue=bootstrap.pvalue,
        pvalue_of="no correlation, layers independent of each other",
        n=bootstrap.n,
        function="tlspectral.stats.layer_bootstrap",
        reason=bootstrap.reason,
    )


def _within_layers(heads: pd.DataFrame, method: Method) -> _Row:
    result = _partial_within_layers(heads, method)
    return _Row(
        _WITHIN,
        method,
        result.statistic,
        pvalue=result.pvalue,
        pvalue_of="no correlation among the heads of a layer",
        n=result.n,
        function="tlspectral.stats.partial_spearman",
        reason=result.reason,
    )


def _percentile(heads: pd.DataFrame, k: int) -> _Row:
    top_heads = top_head_percentile(heads, k=k)
    as_high = int((heads["D_head"].rank(pct=True) >= top_heads.statistic).sum())
    # The median of k is at or above a value when more than half of the k are.
    chance = hypergeometric_overlap(top_heads.n, as_high, k, (k + 1) // 2)
    return _Row(
        f"top-{k} percentile of D_head",
        "median",
        top_heads.statistic,
        pvalue=chance.pvalue,
        pvalue_of=f"{k} heads at random reach it",
        n=top_heads.n,
        function="tlspectral.stats.top_head_percentile",
    )


def _attenuation(heads: pd.DataFrame, method: Method, draws: int, seed: int) -> _Row:
    result = attenuation(heads, method=method, draws=draws, seed=seed)
    return _Row(
        "attenuation",
        method,
        result.statistic,
        interval=result.interval,
        n=result.n,
        function="tlspectral.stats.attenuation",
        reason=result.reason,
    )


def _placebo(heads: pd.DataFrame, placebo: pd.DataFrame, method: Method, share: Callable[[pd.DataFrame], Any]) -> _Row:
    result = placebo_attenuation(heads, placebo, share)
    return _Row(
        f"attenuation by placebo: {result.method}",
        method,
        float(result.draws.mean()),
        interval=(float(result.draws.min()), float(result.draws.max())),
        pvalue=result.pvalue,
        pvalue_of="the model's own phase takes no more (low and high: range of draws)",
        n=result.n,
        function="tlspectral.heads.placebos.placebo_attenuation",
        reason=result.reason,
    )


def _partial_alone(heads: pd.DataFrame, method: Method) -> float:
    return partial_spearman(heads["D_head"], heads["prev"], heads["dir_frac"], method=method).statistic


def _partial_within_layers(heads: pd.DataFrame, method: Method) -> PartialCorrelation:
    return partial_spearman(heads["D_head"], heads["prev"], heads["dir_frac"], method=method, layers=heads["layer"])


def _share_alone(heads: pd.DataFrame, share: Callable[[pd.DataFrame], Any]) -> float:
    return float(share(heads).statistic)
