"""One head table for each draw of some of its columns, such as those of a placebo or of perturbed weights."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from tlspectral.tables.same_model import require_same_model
from tlspectral.tables.schema import require


def drawn_columns(layer: int, heads: int, draws: Iterable[Mapping[str, Any]], first: int = 0) -> pd.DataFrame:
    """Return `draw, layer, head` and the columns of each draw of a layer's heads, draw after draw."""
    tables = [
        pd.DataFrame({"draw": draw, "layer": layer, "head": np.arange(heads), **columns})
        for draw, columns in enumerate(draws, start=first)
    ]
    return pd.concat(tables)


def tables_with_draws(heads: pd.DataFrame, draws: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield a copy of `heads` for every draw, in order, in which the columns of that draw replace its own.

    Rows are matched by layer and head; the order, index and `attrs` of `heads` stay, and rows of `draws` that `heads`
    does not have are left out. `D_head_pct` follows a drawn `D_head`: it is ranked again over the rows of `heads`.

    Args:
        heads: a table with columns `layer, head`.
        draws: a table with columns `draw, layer, head` and any others, which replace those of `heads`.

    Raises:
        ValueError: `layer`, `head` or `draw` is missing, a table has no rows, a head of `heads` stands twice or lacks a
            row in some draw, or the `attrs` of the tables name different weights.
    """
    head_columns = ["layer", "head"]
    for name, table, needed, made_by in (
        ("heads", heads, head_columns, "analyze_heads"),
        ("draws", draws, ["draw", *head_columns], "permuted_pairing, pseudo_rope or weight_noise_draws"),
    ):
        require(table, needed, made_by, name=f"table of {name}")
        if table.duplicated(needed).any():
            raise ValueError(f"the table of {name} has more than one row for some {', '.join(needed)}")
    require_same_model(heads, draws.attrs, "the draws")
    drawn = [column for column in draws if column not in ("draw", *head_columns)]
    index = pd.MultiIndex.from_frame(heads.loc[:, head_columns])
    for draw, rows in draws.groupby("draw", sort=True):
        by_head = rows.set_index(head_columns)
        missing = index.difference(by_head.index)
        if len(missing):
            layer, head = missing[0]
            raise ValueError(f"draw {draw} lacks {len(missing)} of {len(index)} heads, such as L{layer}H{head}")
        replaced = heads.copy()
        replaced[drawn] = by_head.loc[index, drawn].to_numpy()
        if "D_head" in drawn and "D_head_pct" in replaced:
            replaced["D_head_pct"] = replaced["D_head"].rank(pct=True)
        yield replaced
