"""Scores of early and late layers: the median test of the paper."""

from typing import Any

import numpy as np
import pandas as pd
import scipy.stats

from tlspectral.tables.schema import Schema, columns, require

MEDIAN_TESTS = Schema(
    "median_tests",
    columns("""
        score        | label           | Score that is tested: s_pos or s_sym.
        early_median | weighted cosine | Its median over heads of the first half of the layers.
        late_median  | weighted cosine | Its median over heads of the other layers, the middle one among them.
        statistic    | chi-square      | Of Mood's median test with Yates' correction. NaN where nothing is compared.
        pvalue       | probability     | p of that test.
    """),
    "`tlspectral_studies.positional_symbolic.median_tests`",
)


def median_tests(scores: pd.DataFrame) -> pd.DataFrame:
    """Mood's median test of each score between heads of the first half of the layers and the others.

    Args:
        scores: table of `positional_symbolic`, one row per head. Its `attrs` say how many layers the model has; without
            them the last layer is the last in the table.

    Returns:
        DataFrame, a row per score. Columns: `score, early_median, late_median, statistic, pvalue`. Heads without a
        score are left out. The test is NaN where a half has no head, or where no head lies above the median of all.

    Raises:
        ValueError: a column that the table lacks, no rows, or several rows of a head.

    Source: "Decoupling Positional and Symbolic Attention Behavior" (PS, section 3.3, footnote 2).

    What it does not establish: that depth is the cause. Heads of a layer are not independent, as the test assumes:
    at nominal 5 % it rejects 29.7 % of simulated tables with an intra-class correlation of 0.4 (docs/statistics.md).
    """
    require(scores, ("layer", "head", "s_pos", "s_sym"), "positional_symbolic", name="table of scores")
    if scores.duplicated(["layer", "head"]).any():
        raise ValueError("median_tests takes one row per head: leave by= and per_frequency= of positional_symbolic out")
    half = scores.attrs.get("n_layers", scores["layer"].max() + 1) // 2
    rows = []
    for score in ("s_pos", "s_sym"):
        early, late = (
            scores.loc[rows_of_half, score].dropna().to_numpy(np.float64)
            for rows_of_half in (scores["layer"] < half, scores["layer"] >= half)
        )
        statistic = pvalue = np.nan
        both = np.concatenate([early, late])
        # Ties with the grand median count as below it.
        if len(early) and len(late) and (both > np.median(both)).any():
            tested: Any = scipy.stats.median_test(early, late)
            statistic, pvalue = float(tested.statistic), float(tested.pvalue)
        medians = (float(np.median(values)) if len(values) else np.nan for values in (early, late))
        rows.append((score, *medians, statistic, pvalue))
    table = pd.DataFrame(rows, columns=[column.name for column in MEDIAN_TESTS.columns])
    return MEDIAN_TESTS.frame(table, scores.attrs)
