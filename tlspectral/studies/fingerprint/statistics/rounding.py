"""The noise of weight rounding in statistics of a head table."""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd

from tlspectral.studies.fingerprint.statistics.tables_with_draws import tables_with_draws
from tlspectral.tables.schema import Schema, columns

STATISTIC_NOISE = Schema(
    "statistic_noise",
    columns("""
        statistic | label            | Name of the statistic, as it was given.
        value     | of the statistic | The statistic of the head table as it is.
        mean      | of the statistic | Its mean over draws, each with its spectral columns in place of the table's.
        sd        | of the statistic | Its standard deviation (ddof 1) over draws.
        low       | of the statistic | 2.5 % quantile over draws.
        high      | of the statistic | 97.5 % quantile over draws.
        draws     | count            | Number of draws.
    """),
)


def statistic_noise(
    heads: pd.DataFrame, draws: pd.DataFrame, statistics: Mapping[str, Callable[[pd.DataFrame], float]]
) -> pd.DataFrame:
    """Compute how far statistics of the head table move when the stored weights move within their rounding.

    Each statistic is computed again on the table with the spectral columns of each draw in place of its own. The
    detector scores (`prev`, `dup`, `ind`) and the columns of the null stay.

    Args:
        heads: table of `analyze_heads`.
        draws: table of `weight_noise_draws` on the same model.
        statistics: name -> function of a head table, which returns a number.

    Returns:
        DataFrame, a statistic a row. Columns: `statistic, value, mean, sd, low, high, draws`.

    Raises:
        ValueError: the two tables are not of the same model or heads.

    What it does not establish: a confidence interval over models, prompts or heads. Rounding is one source of
    uncertainty, and it moves all draws away from the stored weights alike, so `value` need not lie within low and high.
    """
    tables = list(tables_with_draws(heads, draws.loc[draws["draw"] >= 0]))
    rows = []
    for name, statistic in statistics.items():
        drawn = np.array([float(statistic(table)) for table in tables])
        low, high = np.quantile(drawn, [0.025, 0.975])
        row = {"statistic": name, "value": float(statistic(heads)), "mean": drawn.mean(), "sd": drawn.std(ddof=1)}
        rows.append(row | {"low": low, "high": high, "draws": len(drawn)})
    return STATISTIC_NOISE.frame(rows, {key: value for key, value in draws.attrs.items() if key != "columns"})
