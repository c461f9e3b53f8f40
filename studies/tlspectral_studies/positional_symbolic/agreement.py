"""Rank correlations of positional and symbolic scores with a head's weights and detectors; tables in, tables out."""

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Float64
from numpy.random import Generator, default_rng

from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.same_model import origin_of, require_same_model
from tlspectral.tables.schema import Schema, columns, require

_SCORES = ("s_pos", "s_sym", "exclusion_index")
_INTERVAL = (0.025, 0.975)
_FEWEST = 3  # a rank correlation of two points is always 1 or -1
_ROUNDING = 1e-12  # a shuffle that restores the data counts as equal, whatever its correlation rounds to

_AGREEMENT = columns("""
    n          | count       | Heads that have both numbers, or rotary pairs of the head.
    spearman   | correlation | Rank correlation over these. NaN for fewer than three or a constant.
    null_low   | correlation | 2.5 % quantile of spearman with these shuffled.
    null_high  | correlation | 97.5 % quantile of the same.
    null_share | share       | Share of shuffles at or below spearman.
""")
SCORE_AGREEMENT = Schema(
    "score_agreement",
    (
        *columns("""
            score  | label | Score on the prompt: s_pos, s_sym or exclusion_index.
            column | label | Column of the head table that it is compared with.
        """),
        *_AGREEMENT,
        *columns("""
            layer_null_low   | correlation | As null_low, with heads shuffled within their layer: a trend over layers
                             |             | stays.
            layer_null_high  | correlation | As null_high, with heads shuffled within their layer.
            layer_null_share | share       | As null_share, with heads shuffled within their layer.
        """),
    ),
    "`tlspectral_studies.positional_symbolic.score_agreement`; `tlspectral study positional-figures FOLDER "
    "--table TABLE` writes it as agreement_prompt.parquet and agreement_key.parquet",
)
FREQUENCY_AGREEMENT = Schema(
    "frequency_agreement",
    (
        *HEAD,
        *_AGREEMENT,
        *columns("""
            turned_share | share       | Share of the circular shifts of the frequencies at or below spearman.
            others       | correlation | Mean correlation of this head's im_share with s_pos of all other heads.
        """),
    ),
    "`tlspectral_studies.positional_symbolic.frequency_agreement`",
)


def score_agreement(
    scores: pd.DataFrame,
    heads: pd.DataFrame,
    *,
    columns: tuple[str, ...] = ("rope_imag_frac", "D_head", "prev"),
    draws: int = 1000,
    seed: int = 0,
) -> pd.DataFrame:
    """Rank correlation, over heads, of scores on a prompt with columns of the head table, against two shuffles.

    Args:
        scores: `layer, head` and any of `s_pos, s_sym, exclusion_index`: what `positional_symbolic` returns.
        heads: the table of `analyze_heads`.
        columns: of that table.
        draws: shuffles of each kind.
        seed: of the shuffles.

    Returns:
        DataFrame, one row per score and column. Columns: `score, column, n, spearman, null_low, null_high, null_share,
        layer_null_low, layer_null_high, layer_null_share`.

    Raises:
        ValueError: a column that is missing, tables of two models, or no head in both tables.

    What it does not establish: that either measure is right, or a mechanism: both may follow a third quantity, such as
    depth, which the second null shows. Heads of a layer are not independent samples, so the first null is too narrow.
    """
    score_columns = [name for name in _SCORES if name in scores]
    require(scores, ("layer", "head"), "positional_symbolic", name="table of scores")
    require(heads, ("layer", "head", *columns), "analyze_heads", name="table of heads")
    require_same_model(heads, scores.attrs, "the scores")
    if not score_columns:
        raise ValueError(f"scores have none of the columns {', '.join(_SCORES)}")
    joined = scores[["layer", "head", *score_columns]].merge(heads[["layer", "head", *columns]], on=["layer", "head"])
    if joined.empty:
        raise ValueError("no head is in both tables: are they of one model?")
    rows = []
    for score in score_columns:
        for column in columns:
            complete = joined[["layer", score, column]].dropna()
            x, y = _standard_ranks([complete[name].to_numpy(float) for name in (score, column)])
            layers, everywhere = complete["layer"].to_numpy(), np.zeros(len(complete))
            rows.append(
                {
                    "score": score,
                    "column": column,
                    "n": len(complete),
                    "spearman": _correlation(x, y),
                    **_against(x, y, everywhere, draws, default_rng(seed), ""),
                    **_against(x, y, layers, draws, default_rng(seed), "layer_"),
                }
            )
    return SCORE_AGREEMENT.frame(pd.DataFrame(rows), {"draws": draws, "seed": seed})


def frequency_agreement(
    frequencies: pd.DataFrame, weights: pd.DataFrame, *, draws: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """Per head, rank correlation over frequencies of the weights' phase share with the positional score.

    The phase share is `im_share` of `frequency_table` (FP section 7: from weights alone), the positional score `s_pos`
    of each frequency on a prompt (PS figure 1C).

    Args:
        frequencies: `layer, head, frequency, s_pos`, from `positional_symbolic(per_frequency=True)`.
        weights: the table of `frequency_table`.
        draws: shuffles of a head's frequencies.
        seed: of the shuffles.

    Returns:
        DataFrame, one row per head. Columns: `layer, head, name, n, spearman, null_low, null_high, null_share,
        turned_share, others`.

    Raises:
        ValueError: a column that is missing, tables of two models, no head in both, or heads with different numbers of
            frequencies.

    What it does not establish: that the phase content causes the score. `im_share` of a random head is about 0.5 at
    every frequency, and s_pos follows the wavelength whatever the head: look at `others`. Only unshuffled neighbours
    are alike, so `null_share` is no exact level, and `turned_share` is no finer than one over the number of pairs.
    """
    keys = ["layer", "head", "frequency"]
    made_by = "positional_symbolic(..., per_frequency=True)"
    require(frequencies, (*keys, "s_pos"), made_by, name="table of frequencies")
    require(weights, (*keys, "im_share"), "frequency_table", name="table of weights")
    require_same_model(weights, frequencies.attrs, "the scores", name="frequency table")
    joined = frequencies[[*keys, "s_pos"]].merge(weights[[*keys, "im_share"]], on=keys)
    if joined.empty:
        raise ValueError("no head is in both tables: are they of one model?")
    profiles = {
        head: (group["im_share"].to_numpy(float), group["s_pos"].to_numpy(float))
        for head, group in joined.sort_values(keys).groupby(["layer", "head"])
    }
    if len({len(shares) for shares, _ in profiles.values()}) > 1:
        raise ValueError("heads have different numbers of frequencies: compare them layer by layer")
    x, y = (_standard_ranks([profile[side] for profile in profiles.values()]) for side in (0, 1))
    correlations = x @ y.T / x.shape[1]  # [head of the shares, head of the scores]
    rows = []
    for index, (layer, head) in enumerate(profiles):
        rho = correlations[index, index]
        shifted = [np.mean(x[index] * np.roll(y[index], by)) for by in range(1, x.shape[1])]
        others = np.delete(correlations[index], index)
        rng = default_rng([seed, layer, head])
        rows.append(
            {
                "layer": layer,
                "head": head,
                "n": x.shape[1],
                "spearman": rho,
                **_against(x[index], y[index], np.zeros(x.shape[1]), draws, rng, ""),
                "turned_share": np.nan if np.isnan(rho) else float(np.mean(np.array(shifted) <= rho + _ROUNDING)),
                "others": float(np.mean(others[~np.isnan(others)])) if (~np.isnan(others)).any() else np.nan,
            }
        )
    attrs = {**origin_of(weights.attrs), "draws": draws, "seed": seed}
    return FREQUENCY_AGREEMENT.frame(pd.DataFrame(rows), attrs)


def _standard_ranks(profiles: list[Float64[np.ndarray, "n"]]) -> Float64[np.ndarray, "profiles n"]:
    """Ranks of each profile with mean 0 and variance 1, so that a mean product is Spearman's correlation.

    NaN for a profile that is constant, that has a NaN, or of which there are fewer than three values.
    """
    values = np.stack(profiles)
    if values.shape[1] < _FEWEST:
        return np.full_like(values, np.nan)
    ranks = scipy.stats.rankdata(values, axis=1)
    centred = ranks - ranks.mean(1, keepdims=True)
    spread = centred.std(1, keepdims=True)
    void = (spread == 0) | np.isnan(values).any(1, keepdims=True)
    return np.where(void, np.nan, centred / np.where(void, 1.0, spread))


def _correlation(x: Float64[np.ndarray, "n"], y: Float64[np.ndarray, "n"]) -> float:
    return float(np.mean(x * y)) if len(x) else float("nan")


def _against(
    x: Float64[np.ndarray, "n"],
    y: Float64[np.ndarray, "n"],
    groups: np.ndarray,
    draws: int,
    rng: Generator,
    prefix: str,
) -> dict[str, float]:
    """95 % of the correlations with `y` shuffled within groups, and the share of them at or below the real one."""
    observed = _correlation(x, y)
    if np.isnan(observed):
        return {f"{prefix}null_{name}": np.nan for name in ("low", "high", "share")}
    shuffled = np.tile(y, (draws, 1))
    for group in np.unique(groups):
        members = groups == group
        shuffled[:, members] = rng.permuted(shuffled[:, members], axis=1)
    null = shuffled @ x / len(x)
    low, high = np.quantile(null, _INTERVAL)
    share = float(np.mean(null <= observed + _ROUNDING))
    return {f"{prefix}null_low": float(low), f"{prefix}null_high": float(high), f"{prefix}null_share": share}
