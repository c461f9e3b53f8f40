"""FP section 4 and Table 1: spectral metrics against what heads do, on GPT-2.

Also where the heads of a known circuit stand: "Interpretability in the Wild" (Wang et al. 2022).
"""

from collections.abc import Iterator

import pandas as pd

from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.fingerprint.published import published_heads
from tlspectral_studies.fingerprint.replication.claims import Claim, PublishedTables, needs_weights, value_at
from tlspectral_studies.fingerprint.statistics import spearman_table

_TABLE, _SECTION = "FP, Table 1", "FP, section 4"
_BEHAVIOURS = {"prev": "previous token", "dup": "duplicate token", "ind": "induction"}
_PRINTED = {
    "dir_frac": ("+0.47", "-0.59", "-0.50"),
    "content_pos_frac": ("-0.63", "+0.59", "+0.57"),
    "imag_mass": ("+0.56", "-0.65", "-0.61"),
}
# All spectral columns of the published table that do not refer to the null.
_SPECTRAL = (*_PRINTED, "D_head", "henrici", "spectral_radius", "cond_eig")


def metrics_against_behaviour(tables: PublishedTables) -> Iterator[Claim]:
    """The nine correlations of Table 1 with detectors, and the largest q among them."""
    table = spearman_table(tables.heads["gpt2"], list(_PRINTED), list(_BEHAVIOURS))
    correlation = table.set_index(["column", "against"])["statistic"]
    for metric, row in _PRINTED.items():
        for behaviour, printed in zip(_BEHAVIOURS, row, strict=True):
            yield Claim(
                f"table1/{metric}/{behaviour}",
                _TABLE,
                f"GPT-2: rank correlation of {metric} with {_BEHAVIOURS[behaviour]}",
                printed,
                value_at(correlation, (metric, behaviour)),
            )
    worst = float(table["q"].max())
    yield Claim("table1/q", _SECTION, "GPT-2: largest q (BH) of these nine", "< 0.001", worst)


def metrics_against_copying(tables: PublishedTables) -> Iterator[Claim]:
    """Table 1's column of copying, which the paper calls unrelated to all query-key metrics."""
    table = spearman_table(tables.heads["gpt2"], list(_SPECTRAL), "copying").set_index("column")
    what = "GPT-2: rank correlation of dir_frac with copying"
    yield Claim("table1/dir_frac/copying", _TABLE, what, "0.06", value_at(table, "dir_frac", "statistic"))
    for metric in _PRINTED:
        yield Claim(
            f"table1/{metric}/copying/p",
            _TABLE,
            f"GPT-2: p of {metric} with copying, printed as ns",
            "> 0.05",
            float(table.loc[metric, "pvalue"]),
            remark=f"rho {table.loc[metric, 'statistic']:+.3f}",
        )
    least = table["q"].idxmin()
    yield Claim(
        "copying/every_metric",
        _SECTION,
        f"GPT-2: smallest q (BH) of {len(_SPECTRAL)} spectral columns with copying, orthogonal to every one",
        "> 0.05",
        float(table.loc[least, "q"]),
        if_differs=f"{least} has rho {value_at(table, least, 'statistic'):+.2f}; Table 1 does not list it",
    )


def content_signature(tables: PublishedTables) -> Iterator[Claim]:
    """Correlations that section 4 adds: the meaning of the content axis, and the same sign on Llama."""
    gpt2 = spearman_table(tables.heads["gpt2"], ["self_match", "score_asym"], ["content_pos_frac", "dir_frac"])
    correlation = gpt2.set_index(["column", "against"])["statistic"]
    llama = spearman_table(tables.heads["llama-3-8b"], "content_pos_frac", "prev")["statistic"].iloc[0]
    linear = value_at(tables.heads["gpt2"].corr(numeric_only=True), "score_asym", "dir_frac")
    where = "GPT-2: rank correlation of"
    yield Claim(
        "content/self_match",
        _SECTION,
        f"{where} self_match with content_pos_frac",
        "0.96",
        value_at(correlation, ("self_match", "content_pos_frac")),
    )
    yield Claim(
        "content/score_asym",
        _SECTION,
        f"{where} score_asym with dir_frac",
        "0.66",
        value_at(correlation, ("score_asym", "dir_frac")),
        remark=f"of ranks; Pearson's is {linear:.2f}",
    )
    yield Claim(
        "content/llama", _SECTION, "Llama-3-8B: rank correlation of content_pos_frac with prev", "-0.30", float(llama)
    )


def composition_ranks(tables: PublishedTables) -> Iterator[Claim]:
    """Ranks of the previous-token head by K-composition: the tables hold no ranks."""
    pairs = (("gpt2", "4.11", ("5.1", "5.5", "6.9")), ("pythia-410m", "5.2", ("8.6", "10.9", "11.14")))
    for model, source, targets in pairs:
        for induction in targets:
            yield needs_weights(
                f"composition/{model}/{induction}",
                _SECTION,
                f"{model}: rank of {source} by K-composition with {induction}",
                "1",
                "tlspectral.heads.k_composition",
                "needs all earlier heads, the tables hold no ranks",
            )


IOI_CLASSES = {
    "name mover": ((9, 9), (10, 0), (9, 6)),
    "backup name mover": ((10, 10), (10, 6), (10, 2), (10, 1), (11, 2), (9, 7), (9, 0), (11, 9)),
    "negative name mover": ((10, 7), (11, 10)),
    "S-inhibition": ((7, 3), (7, 9), (8, 6), (8, 10)),
    "induction": ((5, 5), (5, 8), (5, 9), (6, 9)),
    "duplicate token": ((0, 1), (0, 10), (3, 0)),
    "previous token": ((2, 2), (4, 11)),
}
"""Heads (layer, head) by class, as in figure 2 of the paper."""

_SCORES = ("dir_frac", "D_head", "content_pos_frac", "prev", "dup", "ind")

_IOI_CLASSES = Schema(
    "ioi_classes",
    columns("""
        heads_class          | label | Class of heads of GPT-2's circuit for indirect objects.
        heads                | text  | The heads, layer.head.
        n                    | count | Heads of the class.
        dir_frac_pct         | %     | Median over the class of the percentile of dir_frac among all heads, rank / n.
        D_head_pct           | %     | The same of D_head.
        content_pos_frac_pct | %     | The same of content_pos_frac.
        prev_pct             | %     | The same of prev.
        dup_pct              | %     | The same of dup.
        ind_pct              | %     | The same of ind.
    """),
)


def ioi_classes() -> pd.DataFrame:
    """Median percentiles of the heads of GPT-2's circuit for indirect objects among all 144 heads, by class.

    Returns:
        DataFrame, a class a row. Columns: `heads_class, heads, n, dir_frac_pct, D_head_pct, content_pos_frac_pct,
        prev_pct, dup_pct, ind_pct`.

    Source: Wang et al., "Interpretability in the Wild: a Circuit for Indirect Object Identification in GPT-2 small"
    (2022), section 3.

    What it does not establish: that a class is told apart by these scores. Classes have two to eight heads, and they
    were found by their effect on one task.
    """
    heads = published_heads("gpt2").set_index(["layer", "head"])
    percentiles = 100 * heads[list(_SCORES)].rank() / len(heads)
    rows = []
    for name, members in IOI_CLASSES.items():
        medians = percentiles.loc[list(members)].median()
        rows.append(
            {
                "heads_class": name,
                "heads": ", ".join(f"{layer}.{head}" for layer, head in members),
                "n": len(members),
                **{f"{column}_pct": float(medians[column]) for column in _SCORES},
            }
        )
    return _IOI_CLASSES.frame(rows)
