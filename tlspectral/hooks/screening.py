"""Screens: choose which effects to measure by cheap estimates, and bound the effects that were not measured."""

from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Bool, Float64, Int

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.tables.schema import Schema, columns, require

_CONFIDENCE = 0.95

MISSED_EDGES = Schema(
    "missed_edges",
    columns("""
        ranks      | label | Ranks of the estimates, such as 51 to 500; or logits: edges to the logits near the chosen.
        n_edges    | count | Edges of these ranks that were not chosen.
        drawn      | count | Edges drawn at random among n_edges and measured; all edges in the row logits.
        large      | count | Drawn edges whose |delta| is at least attrs["bar"].
        share_high | share | Upper end of a one-sided 95 % interval (Clopper-Pearson) of the share of large edges among
                   |       | n_edges; in the row logits, and where all were measured, the share itself.
        most       | count | share_high as a number of edges.
    """),
    "`tls.hooks.missed_edges`",
)


def screened(
    estimates: Float64[np.ndarray, "rows"], most: int, seed: int
) -> tuple[Int[np.ndarray, "rows"], np.ndarray]:
    """Return the row numbers ordered by |estimate|, largest first, and a word per row: "top", "control" or "".

    "top": the `most` largest estimates. "control": as many others, drawn at random with `seed`. "": not to be measured.
    The words are in the order of `estimates`.
    """
    order = np.argsort(-np.abs(estimates), kind="stable")
    measured = np.full(len(order), "", dtype=object)
    measured[order[:most]] = "top"
    measured[np.random.default_rng(seed).permutation(order[most:])[:most]] = "control"
    return order, measured


def screened_edges(
    estimates: Float64[np.ndarray, "rows"], to_logits: Bool[np.ndarray, "rows"], most: int, seed: int
) -> tuple[Int[np.ndarray, "rows"], np.ndarray]:
    """Return the edge numbers ordered by |estimate|, largest first, and a word per edge that says why it is measured.

    "top": the `most` largest estimates. "logits": edges to the logits (`to_logits` is True for these) up to rank 4
    `most`. Others are drawn at random, with `seed`, from three ranges of ranks and named after them; with `most=50`: 30
    of "51 to 500", 20 of "501 to 5000", 20 of "beyond 5000". "": not measured. The words are in the order of
    `estimates`.
    """
    order = np.argsort(-np.abs(estimates), kind="stable")
    words, rng = np.full(len(order), "", dtype=object), np.random.default_rng(seed)
    words[order[:most]] = "top"
    near = order[most : 4 * most]
    words[near[to_logits[near]]] = "logits"
    for (low, high, ranks), share in zip(_rank_layers(most), (0.6, 0.4, 0.4), strict=True):
        others = order[low:high]
        others = others[words[others] == ""]
        words[rng.permutation(others)[: max(1, round(share * most))]] = ranks
    return order, words


def _rank_layers(most: int) -> list[tuple[int, int | None, str]]:
    """Return the three ranges of ranks after the `most` largest, as (start, end, name).

    With `most=50` the first is (50, 500, "51 to 500"). The last has the end None.
    """
    low, high = 10 * most, 100 * most
    return [
        (most, low, f"{most + 1} to {low}"),
        (low, high, f"{low + 1} to {high}"),
        (high, None, f"beyond {high}"),
    ]


@checked_settings
def missed_edges(edges: pd.DataFrame, *, bar: float | int | None = None) -> pd.DataFrame:
    """Bound how many edges with a large effect a screen of `edge_effects` has missed.

    A screen measures only some edges: those with the largest estimates, and random others. `edge_effects(screen=)`
    already puts this table, with the default `bar`, into `attrs["missed"]`. Call it for another `bar`. Example: of ten
    edges drawn at random, none was large; up to 26 % of all edges of these ranks may be.

    >>> import tlspectral as tls, pandas as pd
    >>> table = pd.DataFrame({"estimate": range(40, 0, -1), "delta": 1.0, "measured": ""})
    >>> table.loc[:9, "measured"], table.loc[10:19, "measured"] = "top", "11 to 100"
    >>> table.loc[10:, "delta"] = 0.1
    >>> table.attrs = {"screen": 10, "n_edges": 40}
    >>> float(tls.hooks.missed_edges(table)["share_high"].iloc[0].round(2))
    0.26

    Args:
        edges: the whole table of `edge_effects(screen=)`, with its columns `estimate, delta, measured` and its `attrs`.
        bar: an effect is large if its absolute `delta` is at least `bar`, in the unit of `delta`. Default: the median
            of |`delta`| over the edges with the largest estimates, which the screen chose.

    Returns:
        DataFrame: a row per range of ranks of the estimates, and a row for edges to the logits. Columns: `ranks,
        n_edges, drawn, large, share_high, most`. `n_edges` edges of these ranks were not chosen. `drawn` of the
        unchosen edges were measured, and `large` of the drawn edges are large. With 95 % confidence at most the share
        `share_high` of the `n_edges`, or `most` edges, is large (one-sided Clopper-Pearson interval). `attrs["bar"]` is
        `bar`.

    Raises:
        ValueError: the table is not from a screen, lacks some rows, or `bar` is not positive.

    Not established: that edges which were not drawn have no effect together; only single edges were cut. The bound
    holds for each range of ranks, not for all at once.
    """
    require(edges, ("estimate", "delta", "measured"), "edge_effects(screen=)")
    n = edges.attrs.get("screen")
    if not isinstance(n, int):
        raise ValueError("the table has no attrs['screen']: give a table of edge_effects(..., screen=)")
    if len(edges) != edges.attrs.get("n_edges"):
        raise ValueError(
            f"the table has {len(edges)} of {edges.attrs.get('n_edges')} edges: give the whole table, or read its "
            "attrs['missed']"
        )
    size, words = edges["delta"].abs().to_numpy(float), edges["measured"].to_numpy(object)
    bar = float(np.median(size[words == "top"])) if bar is None else bar
    if not bar > 0:
        raise ValueError(f"bar must be a positive number, not {shown(bar)}")
    order = np.argsort(-edges["estimate"].abs().to_numpy(float), kind="stable")
    rows: list[dict[str, Any]] = []
    for low, high, ranks in _rank_layers(n):
        others = order[low:high]
        others = others[words[others] != "logits"]
        drawn = others[words[others] == ranks]
        if not len(others):
            continue
        large, k = int((size[drawn] >= bar).sum()), len(drawn)
        share = large / k if k == len(others) else _upper_bound(large, k)
        most = int(np.floor(share * len(others) + 1e-9))
        rows.append(
            {"ranks": ranks, "n_edges": len(others), "drawn": k, "large": large, "share_high": share, "most": most}
        )
    near = size[words == "logits"]
    large = int((near >= bar).sum())
    share = large / len(near) if len(near) else np.nan
    rows.append(
        {
            "ranks": "logits",
            "n_edges": len(near),
            "drawn": len(near),
            "large": large,
            "share_high": share,
            "most": large,
        }
    )
    return MISSED_EDGES.frame(pd.DataFrame(rows), {**edges.attrs, "bar": bar})


def _upper_bound(large: int, drawn: int) -> float:
    """Return the upper end of the one-sided 95 % Clopper-Pearson interval of a share of edges.

    `large` of the `drawn` edges have the property whose share in all edges is bounded.
    """
    return 1.0 if large == drawn else float(scipy.stats.beta.ppf(_CONFIDENCE, large + 1, drawn - large))


def agreement(rows: pd.DataFrame) -> tuple[float | None, float | None]:
    """Return Spearman's correlation of the columns `estimate` and `delta` of a table, and its two-sided p.

    Returns (None, None) for fewer than three rows.
    """
    pairs = rows[["estimate", "delta"]].to_numpy(float)
    if len(pairs) < 3:
        return None, None
    correlation = scipy.stats.spearmanr(pairs)
    return float(correlation.statistic), float(correlation.pvalue)  # pyright: ignore[reportAttributeAccessIssue]
