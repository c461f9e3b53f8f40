"""Which of many estimated effects are measured: the largest, and random others by which the estimates are judged."""

from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from jaxtyping import Bool, Float64, Int

from tlspectral.tables.schema import Schema, columns, require

_CONFIDENCE = 0.95

MISSED_EDGES = Schema(
    "missed_edges",
    columns("""
        ranks      | label | Ranks of the estimates of these edges, or logits: those to the logits near the chosen ones.
        n_edges    | count | Edges of these ranks that were not chosen.
        drawn      | count | Those of them that were drawn at random and measured; of logits all.
        large      | count | Those of them whose |delta| is at least attrs["bar"].
        share_high | share | Upper end of a one-sided 95 % interval of the share of large edges (Clopper-Pearson), of
                   |       | these ranks by themselves; of logits, and where all were measured, the share itself.
        most       | count | The number of edges that this is.
    """),
    "`tls.hooks.missed_edges`",
)


def screened(
    estimates: Float64[np.ndarray, "rows"], most: int, seed: int
) -> tuple[Int[np.ndarray, "rows"], np.ndarray]:
    """Return the order of estimates by size, and a word for each row: `"top"`, `"control"` or `""`, not measured."""
    order = np.argsort(-np.abs(estimates), kind="stable")
    measured = np.full(len(order), "", dtype=object)
    measured[order[:most]] = "top"
    measured[np.random.default_rng(seed).permutation(order[most:])[:most]] = "control"
    return order, measured


def screened_edges(
    estimates: Float64[np.ndarray, "rows"], to_logits: Bool[np.ndarray, "rows"], most: int, seed: int
) -> tuple[Int[np.ndarray, "rows"], np.ndarray]:
    """Return the order of the estimates of edges by size, and a word for each row: which draw measures it.

    `"top"` are the `most` largest. All others to the logits up to rank 4 `most` are measured
    (`"logits"`), and some are drawn by rank, named by their ranks: of 50 largest 30 of `"51 to 500"`, 20 of
    `"501 to 5000"` and 20 of `"beyond 5000"`. Empty is not measured.
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
    """Return the layers of ranks behind the largest: from, to, and their name."""
    low, high = 10 * most, 100 * most
    return [
        (most, low, f"{most + 1} to {low}"),
        (low, high, f"{low + 1} to {high}"),
        (high, None, f"beyond {high}"),
    ]


def missed_edges(edges: pd.DataFrame, *, bar: float | int | None = None) -> pd.DataFrame:
    """Bound how many edges that a screen did not choose have a large effect, for each layer of ranks by itself.

    Args:
        edges: a table of `edge_effects(screen=)`, whole: `estimate, delta, measured` and its `attrs`.
        bar: the absolute `delta` from which an effect is large; None is the median of |`delta`| over the chosen edges.

    Returns:
        DataFrame, a row per layer of ranks, and one of edges to the logits, of which all near the chosen ones are
        measured. Columns: `ranks, n_edges, drawn, large, share_high, most`. With 95 % confidence at most this share and
        number of edges of these ranks are large, each layer by itself. `attrs["bar"]` is from where an effect is large.

    Raises:
        ValueError: a table that no screen made, some rows of one, or a bar that is no positive number.

    What it does not establish: that what was not drawn has no effect together with others, which no cut of single edges
    shows. The bound holds for each layer, not for all at once.

    Example: of ten random edges none was large, and a quarter of them may be.

        >>> import tlspectral as tls, pandas as pd
        >>> table = pd.DataFrame({"estimate": range(40, 0, -1), "delta": 1.0, "measured": ""})
        >>> table.loc[:9, "measured"], table.loc[10:19, "measured"] = "top", "11 to 100"
        >>> table.loc[10:, "delta"] = 0.1
        >>> table.attrs = {"screen": 10, "n_edges": 40}
        >>> float(tls.hooks.missed_edges(table)["share_high"].iloc[0].round(2))
        0.26
    """
    require(edges, ("estimate", "delta", "measured"), "edge_effects(screen=)")
    n = edges.attrs.get("screen")
    if not isinstance(n, int):
        raise ValueError("the table has no attrs['screen'], how many edges were chosen: give one of edge_effects")
    if len(edges) != edges.attrs.get("n_edges"):
        raise ValueError(
            f"{len(edges)} of {edges.attrs.get('n_edges')} edges: give the whole table, or its attrs['missed']"
        )
    size, words = edges["delta"].abs().to_numpy(float), edges["measured"].to_numpy(object)
    bar = float(np.median(size[words == "top"])) if bar is None else bar
    if not bar > 0:
        raise ValueError(f"bar must be a positive effect, not {bar!r}")
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
    """Return the one-sided Clopper-Pearson bound of a share."""
    return 1.0 if large == drawn else float(scipy.stats.beta.ppf(_CONFIDENCE, large + 1, drawn - large))


def agreement(rows: pd.DataFrame) -> tuple[float | None, float | None]:
    """Return Spearman's correlation of `estimate` and `delta` in these rows, and its p; None of too few."""
    pairs = rows[["estimate", "delta"]].to_numpy(float)
    if len(pairs) < 3:
        return None, None
    found = scipy.stats.spearmanr(pairs)
    return float(found.statistic), float(found.pvalue)  # pyright: ignore[reportAttributeAccessIssue]
