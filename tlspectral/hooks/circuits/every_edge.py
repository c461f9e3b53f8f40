"""A table of every edge of a model on a task of pairs: estimates of all, exact effects of some."""

import hashlib
import os
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64

from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.pairs import Mask, pairs_of
from tlspectral.hooks.circuits.single_cuts import single_cuts
from tlspectral.hooks.edges.senders import chosen_senders
from tlspectral.models.attention import AttentionView
from tlspectral.selection import Receivers, read_receivers
from tlspectral.tables import WorkPart
from tlspectral.tables.measurement import Measurement
from tlspectral.tables.schema import Schema
from tlspectral.tasks import Task, score_of, standard_error

MEASURED = 50
"""Edges with the largest estimates, and as many random others, whose effect is measured."""

MOST = 2_000
"""Edges that are measured without a screen; a tenth of a second each on SmolLM2-135M."""


def edges_of_pairs(
    view: AttentionView,
    schema: Schema,
    receivers: Receivers | None,
    senders: Any,
    task: Any,
    method: Method | None,
    folder: str | os.PathLike[str] | None,
    seed: int,
) -> pd.DataFrame:
    """Return the table of `edge_effects` for pairs: every edge, or those between given senders and receivers.

    With a `method` all are estimated and some measured, the largest estimate first; else all are measured. Raises as
    `edge_effects`.
    """
    if not isinstance(task, Task):
        raise ValueError("all edges, and edges to a counterfactual, are of pairs: give a Task with counterfactual=")
    pairs = pairs_of(view.model, task)
    graph = pairs.graph
    chosen = graph.possible & _chosen(graph, receivers, senders)
    if not chosen.any():
        raise ValueError("none of the senders writes before one of the receivers reads")
    if method is None and chosen.sum() > MOST:
        raise ValueError(
            f"{int(chosen.sum()):,} edges would be measured one by one: give screen='gradient', which estimates all "
            f"and measures {2 * MEASURED}, or fewer receivers"
        )
    measurement = Measurement(
        schema,
        {"task": pairs.sequences.name, "replace": "counterfactual", "method": method, "seed": seed},
        origin=view.origin(),
        identity={
            "weights": view.weights_digest,
            "pairs": pairs.digests,
            "edges": hashlib.sha256(chosen.tobytes()).hexdigest(),
        },
        folder=folder,
        score=lambda: score_of(view, pairs.sequences).value,
    )
    rows, places = np.nonzero(chosen)
    table, measured = graph.table(rows, places), np.full(len(rows), True)
    if method is not None:
        estimating = WorkPart("estimates", lambda: pd.DataFrame({"estimate": edge_estimates(pairs, method)[chosen]}))
        estimated = measurement.first(estimating)
        order = np.argsort(-estimated["estimate"].abs().to_numpy(), kind="stable")
        rows, places = rows[order], places[order]
        table = table.assign(estimate=estimated["estimate"].to_numpy(), measured="").iloc[order].reset_index(drop=True)
        others = np.random.default_rng(seed).permutation(np.arange(min(MEASURED, len(table)), len(table)))[:MEASURED]
        table.loc[: MEASURED - 1, "measured"], table.loc[others, "measured"] = "top", "control"
        measured = (table["measured"] != "").to_numpy()
    ends = np.column_stack([rows, places])[measured]
    cutting = WorkPart("effects", lambda: _effects(single_cuts(pairs, ends)))
    (effects,) = measurement.made([cutting], description="effects", unit="part").values()
    table.loc[measured, ["delta", "delta_se"]] = effects.to_numpy()
    groups = {} if method is None else {kind: table.loc[table["measured"] == kind] for kind in ("top", "control")}
    screened = {f"rank_correlation_{kind}": _rank_correlation(rows) for kind, rows in groups.items()}
    return measurement.table(
        table, n_pairs=len(pairs.digests), pairs_sha256=pairs.digests, tokens_sha256=pairs.sequences.digest, **screened
    )


def _chosen(graph: Graph, receivers: Receivers | None, senders: Any) -> Mask:
    """Return the edges between given senders and receivers, None for all, whether they exist or not."""
    rows, places = np.ones(len(graph.receivers), dtype=bool), np.ones(len(graph.senders), dtype=bool)
    if receivers is not None:
        rows[:] = False
        rows[[graph.receiver_index[graph.own(one)] for one in read_receivers(receivers)]] = True
    if senders is not None:
        places[:] = False
        known = chosen_senders(graph.view, senders, graph.view.n_layers)
        places[[graph.sender_index[one.name] for one in known]] = True
    return rows[:, None] & places


def _effects(cut: Float64[np.ndarray, "edges pairs"]) -> pd.DataFrame:
    return pd.DataFrame({"delta": cut.mean(1), "delta_se": [standard_error(effect) for effect in cut]})


def _rank_correlation(table: pd.DataFrame) -> float | None:
    """Return the Spearman correlation of estimates and effects; None of fewer than three edges."""
    return float(table["estimate"].corr(table["delta"], method="spearman")) if len(table) > 2 else None
