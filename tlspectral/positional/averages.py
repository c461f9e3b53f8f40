"""Means of score tables over prompts, queries and draws. A prompt in which a head has no score is left out."""

import warnings

import numpy as np
import pandas as pd
from jaxtyping import Float64

WITH_ERRORS = ("s_pos", "s_sym", "exclusion_index", "logit_std")
SCORES = (*WITH_ERRORS, "tau", "alpha_ess")


def mean_over_prompts(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Mean of every score over tables with the same rows in the same order. Raises ValueError where they differ."""
    names = _same_rows(tables)
    values = _mean(np.array([table[list(SCORES)].to_numpy(np.float64) for table in tables]), axis=0)
    return names.assign(**dict(zip(SCORES, values.T, strict=True)))


def over_draws(tables: list[list[pd.DataFrame]]) -> pd.DataFrame:
    """Mean over the queries of each draw, then mean and standard error over draws, row by row.

    The tables, one per draw and query, have the same rows in the same order. Scores have an `_se` (NaN for one draw)
    except for `tau` and `alpha_ess`. Queries and draws without a score are left out.
    """
    of_draws = [mean_over_prompts(draw) for draw in tables]
    names = _same_rows(of_draws)
    columns = {name: names[name].to_numpy() for name in names}
    for score in SCORES:
        by_draw = np.array([table[score].to_numpy() for table in of_draws])
        columns[score] = _mean(by_draw, axis=0)
        if score in WITH_ERRORS:
            columns[f"{score}_se"] = _standard_error(by_draw)
    return pd.DataFrame(columns)


def _same_rows(tables: list[pd.DataFrame]) -> pd.DataFrame:
    names = tables[0].drop(columns=list(SCORES))
    for table in tables:
        if not table[list(names)].equals(names):
            raise ValueError("these tables do not have the same rows, so they cannot be averaged")
    return names


def _mean(values: Float64[np.ndarray, "*shape"], axis: int) -> Float64[np.ndarray, "*rest"]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice", RuntimeWarning)
        return np.nanmean(values, axis=axis)


def _standard_error(by_draw: Float64[np.ndarray, "draws rows"]) -> Float64[np.ndarray, "rows"]:
    count = (~np.isnan(by_draw)).sum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Degrees of freedom", RuntimeWarning)
        return np.nanstd(by_draw, axis=0, ddof=1) / np.sqrt(np.maximum(count, 1))
