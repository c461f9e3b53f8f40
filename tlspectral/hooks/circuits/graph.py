"""The graph of a model: what writes to the residual stream, what reads from it, and the edges between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int

from tlspectral.algebra.rotary import widened
from tlspectral.containers import are_columns, column_names, columns_of, named_fields, values
from tlspectral.errors import BadHead, shown
from tlspectral.hooks.edges.cut import ReceiverInput, receiver_inputs
from tlspectral.hooks.edges.measuring import Edge
from tlspectral.hooks.edges.reached import reached
from tlspectral.hooks.edges.senders import EMBEDDING, SENDER_FORMS, Sender, other_sender
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.view import AttentionView, one_head
from tlspectral.models.stream.mlp import MlpReads, mlp_reads
from tlspectral.models.stream.writes import HeadWrites, head_writes
from tlspectral.selection import Receiver, naming_nodes
from tlspectral.tables.schema import require


@dataclass(frozen=True)
class Graph:
    """Senders and receivers of a model in the order of a forward pass."""

    view: AttentionView

    @cached_property
    def n_heads(self) -> list[int]:
        """Heads of each layer; 0 where it has none."""
        return [0 if writes is None else len(writes.w_o) for writes in self.writes]

    @cached_property
    def mixers(self) -> list[bool]:
        """Which layers have a mixer. It reads the stream as it is, so that no edge into it is cut."""
        return [self.view.writes_more(layer) for layer in range(self.view.n_layers)]

    @cached_property
    def n_kv_heads(self) -> list[int]:
        """Receivers of keys in each layer. Raises UnsupportedArchitecture where values are keys."""
        raw = {layer: self.view.raw(layer) for layer in self.view.layers}
        for layer, one in raw.items():
            require_own_projections(one, layer)
        return [raw[layer].n_kv_receivers if layer in raw else 0 for layer in range(self.view.n_layers)]

    @cached_property
    def mlps(self) -> list[MlpReads | None]:
        """What the MLP of each layer reads; None where there is none."""
        return [mlp_reads(self.view, layer) for layer in range(self.view.n_layers)]

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
        """Queries of heads, keys and values of groups and the MLP of each layer; then the logits."""
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
    def kinds(self) -> dict[tuple[int, str], slice]:
        """Places of the receivers of each kind in a layer, by layer and input."""
        found: dict[tuple[int, str], slice] = {}
        for place, one in enumerate(self.receivers):
            first = found.get((one.layer, one.input), slice(place, 0)).start
            found[one.layer, one.input] = slice(first, place + 1)
        return found

    @cached_property
    def receiver_inputs(self) -> list[tuple[tuple[int, str], ReceiverInput]]:
        """How the receivers of each kind in a layer read, at each hook point."""
        return [(kind, one) for kind in self.kinds for one in receiver_inputs(self.view, *kind)]

    @cached_property
    def writes(self) -> list[HeadWrites | None]:
        """How the heads of each layer write, in the type they are stored in, float32 at least; None without heads."""
        known = {layer: head_writes(self.view, layer, widened) for layer in self.view.layers}
        return [known.get(layer) for layer in range(self.view.n_layers)]

    @cached_property
    def numbers_held(self) -> int:
        """Numbers by which all writes on one token are held: z of the heads, and the others as they are."""
        of_heads = sum(writes.w_o[..., 0].numel() for writes in self.writes if writes is not None)
        return of_heads + (len(self.senders) - sum(self.n_heads)) * self.view.d_model

    @cached_property
    def n_before_layer(self) -> list[int]:
        """How many senders write before each layer, and before the logits."""
        kinds = zip(self.n_heads, self.mixers, self.mlps, strict=True)
        return np.cumsum([1, *(n_heads + mixer + (mlp is not None) for n_heads, mixer, mlp in kinds)]).tolist()

    def n_before(self, receiver: Receiver) -> int:
        """Return how many senders write before a receiver reads; they are the first ones."""
        mlp = self.mlps[receiver.layer] if receiver.input == "mlp" else None
        own = 0 if mlp is None or mlp.parallel else self.n_heads[receiver.layer] + self.mixers[receiver.layer]
        return self.n_before_layer[receiver.layer] + own

    @cached_property
    def possible(self) -> Bool[np.ndarray, "receivers senders"]:
        """Which edges there are: from senders that write before the receiver reads."""
        before = np.array([self.n_before(receiver) for receiver in self.receivers])
        return np.arange(len(self.senders)) < before[:, None]

    def kept(self, edges: Any) -> Bool[np.ndarray, "receivers senders"]:
        """Return a circuit as a mask over all edges; arguments and errors are the same as in `places`."""
        mask = np.zeros_like(self.possible)
        mask[self.places(edges)] = True
        return mask

    def places(self, edges: Any) -> tuple[Int[np.ndarray, "edges"], Int[np.ndarray, "edges"]]:
        """Return row and column in a mask of each edge of a table such as `edge_effects` returns, or of pairs of names.

        Raises ValueError for what names no edges, BadHead for an end that does not exist, or a sender that does not
        write before its receiver reads.
        """
        known: dict[Any, int] = {one.name: row for row, one in enumerate(self.receivers)}
        rows, places = [], []
        for sender, receiver in _named(edges):
            sender = self._sender_name(sender)
            if receiver not in known:
                [end] = reached(self.view, [receiver])
                known[receiver] = self.receiver_index[end.receiver]
            if not self.possible[known[receiver], self.sender_index[sender]]:
                raise BadHead(f"there is no edge from {sender} to {receiver}: the receiver reads before it is written")
            rows.append(known[receiver])
            places.append(self.sender_index[sender])
        return np.array(rows, dtype=int), np.array(places, dtype=int)

    def _sender_name(self, given: str) -> str:
        """Return the name of a sender in tables. Raises BadHead for a sender that the model does not have."""
        if given in self.sender_index:
            return given
        try:
            sender = other_sender(self.view, given.strip()) or Sender(*one_head(self.view, given), "head")
        except BadHead as error:
            raise BadHead(f"{shown(given)} is no sender of this model: {SENDER_FORMS}. {error}") from error
        if sender.name not in self.sender_index:
            raise BadHead(f"{shown(given)} is no sender of this model: layer {sender.layer} has no MLP")
        return sender.name

    def eap_name(self, edge: Edge) -> str:
        """Return the name of an edge in EAP and MIB, of a receiver that heads share one name for each of them.

        They have no mixers, which keep their own name.
        """
        sender, receiver = edge.sender, edge.end.receiver
        named = {"embedding": "input", "mlp": f"m{sender.layer}", "head": f"a{sender.layer}.h{sender.head}"}
        of_sender = named.get(sender.kind, sender.name)
        if receiver.input in ("mlp", "logits"):
            return f"{of_sender}->{f'm{receiver.layer}' if receiver.input == 'mlp' else 'logits'}"
        size = self.n_heads[receiver.layer] // self.n_kv_heads[receiver.layer] if receiver.shared else 1
        heads = range(receiver.head * size, (receiver.head + 1) * size)
        return ", ".join(f"{of_sender}->a{receiver.layer}.h{head}<{receiver.input}>" for head in heads)

    def on_a_path(self, mask: Bool[np.ndarray, "receivers senders"]) -> Bool[np.ndarray, "receivers senders"]:
        """Return which edges of a circuit lie on a path of its edges from the embedding to the logits."""
        reached = np.array([sender.kind in ("embedding", "mix") for sender in self.senders])
        for index, reads in enumerate(self._reads):
            reached[index] |= bool((mask[reads] & reached).any())
        return mask & reached & self.useful(mask)[:, None]

    @cached_property
    def coupled(self) -> list[bool]:
        """Layers of which one head has a part in what another writes: by a norm over all heads, or behind them."""
        found = []
        for layer, writes in enumerate(self.writes):
            norms = () if writes is None else (self.view.raw(layer).q_norm, self.view.raw(layer).k_norm)
            over_heads = any(norm is not None and norm.over_heads for norm in norms)
            found.append(over_heads or (writes is not None and writes.norm.kind != "none"))
        return found

    def useful(
        self, mask: Bool[np.ndarray, "receivers senders"], *, by_norms: bool = False
    ) -> Bool[np.ndarray, "receivers"]:
        """Return the receivers from which a path of a circuit's edges leads to the logits, these among them.

        `by_norms`: a path may also lead from one head to another of its layer, where this is `coupled`.
        """
        read_whole = False  # by a mixer that is useful
        useful = np.zeros(len(self.receivers), dtype=bool)
        useful[-1] = True
        for index in reversed(range(1, len(self.senders))):
            if read_whole or mask[useful, index].any():
                layer, _, kind = self.senders[index]
                useful[self._reads[index]] = True
                if by_norms and kind == "head" and self.coupled[layer]:
                    for what in ("q", "k", "v"):
                        useful[self.kinds[layer, what]] = True
                read_whole |= kind == "mix"
        return useful

    @cached_property
    def _reads(self) -> list[list[int]]:
        """Places of the receivers of each sender."""
        return [self._reads_of(sender) for sender in self.senders]

    def _reads_of(self, sender: Sender) -> list[int]:
        if sender.kind in ("embedding", "mix"):
            return []
        if sender.kind == "mlp":
            return [self.kinds[sender.layer, "mlp"].start]
        group = sender.head * self.n_kv_heads[sender.layer] // self.n_heads[sender.layer]
        return [
            self.kinds[sender.layer, what].start + at for what, at in (("q", sender.head), ("k", group), ("v", group))
        ]


_ENDS = ("sender", "receiver")


def _named(edges: Any) -> list[tuple[str, str | Receiver]]:
    """Return sender and receiver of each edge. Raises ValueError for what is neither a table nor pairs of names."""
    if isinstance(edges, pd.DataFrame):
        if edges.empty:
            return []
        require(edges, _ENDS, "edge_effects", name="table of edges")
    of_columns = isinstance(edges, Mapping) and all(values(edges.get(name)) is not None for name in _ENDS)
    if of_columns or set(_ENDS) <= set(column_names(edges) or []):
        edges = zip(*columns_of(edges, _ENDS), strict=True)
    if are_columns(edges):
        raise ValueError(
            f"a {type(edges).__name__} of {len(edges)} lists or arrays has two readings: senders beside their "
            "receivers, or a sender and a receiver for each edge. Write list(zip(senders, receivers)) for the first, a "
            "list of tuples for the second"
        )
    listed = None if isinstance(edges, str) else values(edges)
    named = []
    for one in [edges] if listed is None else listed:
        fields = named_fields(one) or {}
        ends = [fields[name] for name in _ENDS] if set(_ENDS) <= set(fields) else values(one) or []
        if len(ends) != 2 or not isinstance(ends[0], str) or not isinstance(ends[1], str | Receiver):
            raise ValueError(
                "edges are a table of edge_effects, or a list of pairs of names, a sender and a receiver, such as "
                f"[('L16H0', 'L18KV2.k')]; found {shown(one)}"[:300]
                + naming_nodes(one)
            )
        named.append((ends[0], ends[1]))
    return named
