"""The circuit of "Interpretability in the Wild" (Wang et al. 2022) on GPT-2 small, by published scores of its heads."""

import pandas as pd
import scipy.stats

from tlspectral.studies.fingerprint import columns
from tlspectral.tables import named
from tlspectral.tables.published import published_heads
from tlspectral.tables.required import require

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


def ioi_classes(heads: pd.DataFrame | None = None) -> pd.DataFrame:
    """Where the heads of GPT-2's circuit for indirect objects stand among all 144, class by class.

    Args:
        heads: table of heads of GPT-2 small; None for the published one.

    Returns:
        DataFrame, a class a row: `heads_class, heads` (as text), `n`, and for dir_frac, D_head, content_pos_frac, prev,
        dup and ind the median percentile of the class (rank / n, in %) as `<column>_pct`.

    Raises:
        ValueError: a head of the circuit or a column is not in the table.

    Source: Wang et al., "Interpretability in the Wild: a Circuit for Indirect Object Identification in GPT-2 small"
    (2022), section 3.

    What it does not establish: that a class is told apart by these scores. Classes have two to eight heads, and they
    were found by their effect on one task.
    """
    heads = published_heads("gpt2") if heads is None else heads
    require(heads, ("layer", "head", *_SCORES), "analyze_heads on GPT-2 small")
    percentiles = pd.DataFrame(
        {name: 100 * scipy.stats.rankdata(heads[name]) / len(heads) for name in _SCORES},
        index=pd.MultiIndex.from_arrays([heads["layer"], heads["head"]]),
    )
    lacking = [head for members in IOI_CLASSES.values() for head in members if head not in percentiles.index]
    if lacking:
        raise ValueError(
            f"the table has no head {lacking[0][0]}.{lacking[0][1]}: give that of GPT-2 small, all 144 heads"
        )
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
    return named(pd.DataFrame(rows), columns.IOI_CLASSES)
