"""A table of every edge of a model on a task of pairs: estimates of all, exact effects of some."""

from typing import Any

import numpy as np
import pandas as pd
import scipy.stats

from tlspectral.hooks.circuits.estimates import Method, edge_estimates
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.pairs import Pairs
from tlspectral.hooks.circuits.single_cuts import single_cuts
from tlspectral.hooks.edges.senders import Sender
from tlspectral.selection import Receiver
from tlspectral.tasks import standard_error

MEASURED = 50
"""Edges with the largest estimates, and as many random others, whose effect is measured."""


def every_edge(pairs: Pairs, method: Method, seed: int) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return a row per edge, the largest estimate first, and what `attrs` say of the measured ones."""
    graph = pairs.graph
    rows, places = np.nonzero(graph.possible)
    estimate = edge_estimates(pairs, method)[rows, places]
    order = np.argsort(-np.abs(estimate), kind="stable")
    rows, places, estimate = rows[order], places[order], estimate[order]
    senders, receivers = [graph.senders[place] for place in places], [graph.receivers[row] for row in rows]
    table = pd.DataFrame(
        {
            "sender": [one.name for one in senders],
            "layer": [one.layer for one in senders],
            "head": [one.head for one in senders],
            "receiver": [one.name for one in receivers],
            "receiver_layer": [one.layer for one in receivers],
            "receiver_head": [one.head for one in receivers],
            "input": [one.input for one in receivers],
            "eap_name": [_eap_name(graph, *ends) for ends in zip(senders, receivers, strict=True)],
            "estimate": estimate,
            "measured": "",
        }
    )
    table.loc[: MEASURED - 1, "measured"] = "top"
    others = np.random.default_rng(seed).permutation(np.arange(min(MEASURED, len(table)), len(table)))[:MEASURED]
    table.loc[others, "measured"] = "control"
    chosen = np.flatnonzero(table["measured"] != "")
    effects = single_cuts(pairs, np.column_stack([rows[chosen], places[chosen]]))
    table.loc[chosen, "delta"] = effects.mean(1)
    table.loc[chosen, "delta_se"] = [standard_error(effect) for effect in effects]
    return table, {
        f"rank_correlation_{kind}": _rank_correlation(table[table["measured"] == kind]) for kind in ("top", "control")
    }


def _rank_correlation(table: pd.DataFrame) -> float | None:
    """Return the Spearman correlation of estimates and effects; None of fewer than three edges."""
    return float(scipy.stats.spearmanr(table["estimate"], table["delta"]).statistic) if len(table) > 2 else None


def _eap_name(graph: Graph, sender: Sender, receiver: Receiver) -> str:
    """Return the name of an edge in EAP and MIB, of a receiver that heads share one name for each of them."""
    of_sender = {"embedding": "input", "head": f"a{sender.layer}.h{sender.head}", "mlp": f"m{sender.layer}"}[
        sender.kind
    ]
    if receiver.input in ("mlp", "logits"):
        return f"{of_sender}->{f'm{receiver.layer}' if receiver.input == 'mlp' else 'logits'}"
    size = graph.n_heads[receiver.layer] // graph.n_kv_heads[receiver.layer] if receiver.shared else 1
    heads = range(receiver.head * size, (receiver.head + 1) * size)
    return ", ".join(f"{of_sender}->a{receiver.layer}.h{head}<{receiver.input}>" for head in heads)
