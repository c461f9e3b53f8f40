"""`side_by_side`: the strongest heads of two models by each detector, for models whose heads cannot be paired."""

import os
from typing import Any

import pandas as pd

from tlspectral.errors.settings import checked_settings, counted
from tlspectral.heads.detectors.heads import detect_heads
from tlspectral.models.loading import load_model
from tlspectral.selection.node_names import head_name
from tlspectral.tables.detector_columns import DETECTORS
from tlspectral.tables.schema import Schema, columns, require

SIDE_BY_SIDE = Schema(
    "side_by_side",
    columns("""
        detector   | label                 | prev, dup or ind.
        rank       | index                 | Place of both heads in their model by this score, 1 for the largest.
        a          | label                 | Head of model a at this place.
        a_score    | attention probability | Its score.
        a_score_se | attention probability | Standard error of a_score over sequences.
        b          | label                 | Head of model b at this place.
        b_score    | attention probability | Its score.
        b_score_se | attention probability | Standard error of b_score over sequences.
    """),
    "`tls.heads.side_by_side`",
)


@checked_settings
def side_by_side(a: Any, b: Any, *, n: int = 5) -> pd.DataFrame:
    """Set the strongest heads of two models beside each other, by each detector; heads of one index are not paired.

    Use it for two trainings from different seeds, which have no basis in common.

    >>> import tlspectral as tls
    >>> table = tls.heads.side_by_side("tiny-rope", "tiny-rope-sym", n=1)
    >>> table[["detector", "a", "b"]].values.tolist()
    [['prev', 'L0H3', 'L0H0'], ['dup', 'L0H1', 'L0H3'], ['ind', 'L1H1', 'L1H3']]

    Args:
        a, b: two models, or names or paths; or two tables of `analyze_heads` or `detect_heads`.
        n: heads of each model per detector.

    Returns:
        DataFrame with a row per detector and rank. Columns: `detector, rank, a, a_score, a_score_se, b, b_score,
        b_score_se`. Scores are mean attention probabilities on random repeated sequences.

    Raises:
        ValueError: a table lacks a column of the detectors.

    Not established: that heads of one row are the same head. A score says where a head attends, not why.
    """
    count = counted(n, 1, "n is how many heads of each model are listed")
    sides = []
    for name, given in (("a", a), ("b", b)):
        heads = given if isinstance(given, pd.DataFrame) else detect_heads(_loaded(given))
        require(heads, ("layer", "head", *DETECTORS), "detect_heads", name=f"table {name}")
        sides.append(heads)
    rows = []
    for detector in DETECTORS:
        best = [heads.nlargest(count, detector).reset_index(drop=True) for heads in sides]
        for place in range(min(map(len, best))):
            row: dict[str, Any] = {"detector": detector, "rank": place + 1}
            for name, heads in zip(("a", "b"), best, strict=True):
                of_head = heads.loc[place]
                row |= {name: head_name(int(of_head["layer"]), int(of_head["head"]))}
                row |= {
                    f"{name}_score": of_head[detector],
                    f"{name}_score_se": of_head.get(f"{detector}_se", float("nan")),
                }
            rows.append(row)
    origins = {f"model_{name}": heads.attrs.get("model") for name, heads in zip(("a", "b"), sides, strict=True)}
    return SIDE_BY_SIDE.frame(pd.DataFrame(rows, columns=[column.name for column in SIDE_BY_SIDE.columns]), origins)


def _loaded(model: Any) -> Any:
    """Return the model, loaded if it is a name or path."""
    return load_model(model) if isinstance(model, str | os.PathLike) else model
