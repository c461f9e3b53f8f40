"""The graph of a model: what writes to the residual stream, what reads from it, and the edges between them."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int

from tlspectral.errors import BadHead
from tlspectral.hooks.edges.reached import SHARED_LATENT
from tlspectral.hooks.edges.senders import EMBEDDING, Sender
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.layer import require_own_projections
from tlspectral.models.attention.mlp import MlpReads, mlp_reads
from tlspectral.selection import Receiver, read_receivers


@dataclass(frozen=True)
class Graph:
    """Senders and receivers of a model in the order of a forward pass.

    Attributes:
        view: the model.
        n_heads, n_kv_heads: by layer; 0 where a layer has no heads.
        mixers: which layers have a mixer. It reads the stream as it is, so that no edge into it is cut.
        mlps: what the MLP of each layer reads; None where there is none.
    """

    view: AttentionView
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    mixers: tuple[bool, ...]
    mlps: tuple[MlpReads | None, ...]

    @cached_property
    def senders(self) -> list[Sender]:
        """The embedding, then of each layer its heads, its mixer and its MLP."""
        found = [EMBEDDING]
        for layer, n_heads in enumerate(self.n_heads):
            found += [Sender(layer, head, "head") for head in range(n_heads)]
            found += [Sender(layer, -1, "mix")] * self.mixers[layer]
            if self.mlps[layer] is not None:
                found.append(Sender(layer, -1, "mlp"))
        return found

    @cached_property
    def sender_index(self) -> dict[str, int]:
        """Place of each sender, by name."""
        return {sender.name: index for index, sender in enumerate(self.senders)}

    @cached_property
    def receivers(self) -> list[Receiver]:
        """Of each layer the queries of heads, keys and values of groups and the MLP; then the logits."""
        found = []
        for layer in range(len(self.n_heads)):
            found += [Receiver(layer, head, "q") for head in range(self.n_heads[layer])]
            shared = self.n_kv_heads[layer] < self.n_heads[layer]
            for what in ("k", "v"):
                found += [Receiver(layer, head, what, shared) for head in range(self.n_kv_heads[layer])]
            if self.mlps[layer] is not None:
                found.append(Receiver(layer, -1, "mlp"))
        return [*found, Receiver(len(self.n_heads), -1, "logits")]

    @cached_property
    def receiver_index(self) -> dict[Receiver, int]:
        """Place of each receiver."""
        return {receiver: index for index, receiver in enumerate(self.receivers)}

    @cached_property
    def _n_before_layer(self) -> list[int]:
        kinds = zip(self.n_heads, self.mixers, self.mlps, strict=True)
        return np.cumsum([1, *(n_heads + mixer + (mlp is not None) for n_heads, mixer, mlp in kinds)]).tolist()

    def n_before(self, receiver: Receiver) -> int:
        """Return how many senders write before a receiver reads; they are the first ones."""
        mlp = self.mlps[receiver.layer] if receiver.input == "mlp" else None
        own = 0 if mlp is None or mlp.parallel else self.n_heads[receiver.layer] + self.mixers[receiver.layer]
        return self._n_before_layer[receiver.layer] + own

    @cached_property
    def possible(self) -> Bool[np.ndarray, "receivers senders"]:
        """Which edges there are: those of senders that write before the receiver reads."""
        before = np.array([self.n_before(receiver) for receiver in self.receivers])
        return np.arange(len(self.senders)) < before[:, None]

    def own(self, receiver: Receiver) -> Receiver:
        """Return a receiver as the graph has it: keys and values of a head that shares them are those of its group.

        Raises BadHead for one that does not exist.
        """
        layer, head, what, shared = receiver
        layer = layer + self.view.n_layers if -self.view.n_layers <= layer < 0 and what != "logits" else layer
        if what == "logits":
            layer = len(self.n_heads)
        elif 0 <= layer < len(self.n_heads) and what in ("k", "v") and not shared and self.n_heads[layer]:
            size = self.n_heads[layer] // self.n_kv_heads[layer]
            head, shared = head // size, size > 1
        elif 0 <= layer < len(self.n_heads) and shared:
            shared = self.n_kv_heads[layer] < self.n_heads[layer]
        found = Receiver(layer, head, what, shared)
        if found not in self.receiver_index:
            raise BadHead(f"{receiver.name} does not exist in this model")
        return found

    def kept(self, edges: Any) -> Bool[np.ndarray, "receivers senders"]:
        """Return a circuit as a mask over all edges.

        Args:
            edges: a table with columns `sender` and `receiver`, such as one of `edge_effects`, or pairs of names.

        Raises:
            BadHead: a sender or receiver that does not exist, or an edge whose sender does not write before its
                receiver reads.
        """
        mask = np.zeros_like(self.possible)
        mask[self.places(edges)] = True
        return mask

    def places(self, edges: Any) -> tuple[Int[np.ndarray, "edges"], Int[np.ndarray, "edges"]]:
        """Return row and column of each edge in a mask. Arguments and errors as of `kept`."""
        if isinstance(edges, pd.DataFrame):
            edges = zip(edges["sender"], edges["receiver"], strict=True)
        known: dict[Any, int] = {}
        rows, places = [], []
        for sender, receiver in edges:
            if sender not in self.sender_index:
                raise BadHead(f"{sender!r} is no sender of this model: a sender is embedding, L16H0, L3MLP or L2MIX")
            if receiver not in known:
                [read] = read_receivers([receiver])
                known[receiver] = self.receiver_index[self.own(read)]
            if not self.possible[known[receiver], self.sender_index[sender]]:
                raise BadHead(f"there is no edge from {sender} to {receiver}: the receiver reads before it is written")
            rows.append(known[receiver])
            places.append(self.sender_index[sender])
        return np.array(rows, dtype=int), np.array(places, dtype=int)

    def table(self, rows: Int[np.ndarray, "edges"], places: Int[np.ndarray, "edges"]) -> pd.DataFrame:
        """Return the names of edges, given by row and column of a mask, and where their ends stand."""
        ends = [(self.senders[place], self.receivers[row]) for row, place in zip(rows, places, strict=True)]
        return pd.DataFrame(
            {
                "sender": [sender.name for sender, _ in ends],
                "layer": [sender.layer for sender, _ in ends],
                "head": [sender.head for sender, _ in ends],
                "receiver": [receiver.name for _, receiver in ends],
                "receiver_layer": [receiver.layer for _, receiver in ends],
                "receiver_head": [receiver.head for _, receiver in ends],
                "input": [receiver.input for _, receiver in ends],
                "eap_name": [self._eap_name(*both) for both in ends],
            }
        )

    def _eap_name(self, sender: Sender, receiver: Receiver) -> str:
        """Return the name of an edge in EAP and MIB, of a receiver that heads share one name for each of them.

        They have no mixers, which keep their own name.
        """
        named = {"embedding": "input", "mlp": f"m{sender.layer}", "head": f"a{sender.layer}.h{sender.head}"}
        of_sender = named.get(sender.kind, sender.name)
        if receiver.input in ("mlp", "logits"):
            return f"{of_sender}->{f'm{receiver.layer}' if receiver.input == 'mlp' else 'logits'}"
        size = self.n_heads[receiver.layer] // self.n_kv_heads[receiver.layer] if receiver.shared else 1
        heads = range(receiver.head * size, (receiver.head + 1) * size)
        return ", ".join(f"{of_sender}->a{receiver.layer}.h{head}<{receiver.input}>" for head in heads)

    def on_a_path(self, mask: Bool[np.ndarray, "receivers senders"]) -> Bool[np.ndarray, "receivers senders"]:
        """Return which edges of a circuit lie on a path of its edges from the embedding to the logits."""
        of_sender = self._reads
        reached = np.array([sender.kind in ("embedding", "mix") for sender in self.senders])
        for index, reads in enumerate(of_sender):
            reached[index] |= bool((mask[reads] & reached).any())
        read_whole = False  # by a mixer that is useful
        useful = np.zeros(len(self.receivers), dtype=bool)
        useful[-1] = True
        for index in reversed(range(1, len(self.senders))):
            if read_whole or mask[useful, index].any():
                useful[of_sender[index]] = True
                read_whole |= self.senders[index].kind == "mix"
        return mask & reached & useful[:, None]

    @cached_property
    def _reads(self) -> list[list[int]]:
        """The receivers that each sender computes from."""
        return [self._reads_of(sender) for sender in self.senders]

    def _reads_of(self, sender: Sender) -> list[int]:
        if sender.kind in ("embedding", "mix"):
            return []
        if sender.kind == "mlp":
            return [self.receiver_index[Receiver(sender.layer, -1, "mlp")]]
        names = [Receiver(sender.layer, sender.head, what) for what in ("q", "k", "v")]
        return [self.receiver_index[self.own(name)] for name in names]


def graph_of(view: AttentionView) -> Graph:
    """Return the graph of a model. Raises as `AttentionView.raw` and `mlp_reads`."""
    layers = range(view.n_layers)
    raw = {layer: view.raw(layer) for layer in view.layers}
    for layer, one in raw.items():
        require_own_projections(one, layer, SHARED_LATENT)
    return Graph(
        view,
        tuple(len(raw[layer].w_q) if layer in raw else 0 for layer in layers),
        tuple(len(raw[layer].w_k) if layer in raw else 0 for layer in layers),
        tuple(view.writes_more(layer) for layer in layers),
        tuple(mlp_reads(view, layer) for layer in layers),
    )
