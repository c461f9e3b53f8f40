"""`Graph`: the senders that write to a model's residual stream, the receivers that read it, and their edges."""

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
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.mlp import MlpReads, mlp_reads
from tlspectral.models.stream.writes import HeadWrites, head_writes
from tlspectral.selection.node_names import Receiver, naming_nodes
from tlspectral.tables.schema import require


@dataclass(frozen=True)
class Graph:
    """Senders and receivers of a model in the order of a forward pass; an edge leads from a sender to a receiver.

    `view` is the model. A sender writes to the residual stream: embedding, head, mixer or MLP. A receiver reads it:
    queries, keys or values of heads, an MLP, the logits. A mask over edges is a boolean array with a row per receiver
    and a column per sender, in the order of `receivers` and `senders`.
    """

    view: AttentionView

    @cached_property
    def n_heads(self) -> list[int]:
        """List of the number of heads of each layer; 0 for a layer without attention."""
        return [0 if writes is None else len(writes.w_o) for writes in self.writes]

    @cached_property
    def mixers(self) -> list[bool]:
        """List with True for each layer that has a mixer (such as Mamba). No edge into a mixer is ever cut."""
        return [self.view.writes_more(layer) for layer in range(self.view.n_layers)]

    @cached_property
    def n_kv_heads(self) -> list[int]:
        """List of the number of key/value heads of each layer that edges can end in; 0 for a layer without attention.

        Raises UnsupportedArchitecture for a layer without key and value projections of its own.
        """
        raw = {layer: self.view.raw(layer) for layer in self.view.layers}
        for layer, attention in raw.items():
            require_own_projections(attention, layer)
        return [raw[layer].n_kv_receivers if layer in raw else 0 for layer in range(self.view.n_layers)]

    @cached_property
    def mlps(self) -> list[MlpReads | None]:
        """List with an `MlpReads` per layer (how its MLP reads the stream); None for a layer without MLP."""
        return [mlp_reads(self.view, layer) for layer in range(self.view.n_layers)]

    @cached_property
    def senders(self) -> list[Sender]:
        """List of all senders: the embedding, then the heads, mixer and MLP of each layer."""
        senders = [EMBEDDING]
        for layer, n_heads in enumerate(self.n_heads):
            senders += [Sender(layer, head, "head") for head in range(n_heads)]
            senders += [Sender(layer, -1, "mix")] * self.mixers[layer]
            if self.mlps[layer] is not None:
                senders.append(Sender(layer, -1, "mlp"))
        return senders

    @cached_property
    def sender_index(self) -> dict[str, int]:
        """Dict from the name of a sender, such as "L1H0", to its index in `senders`."""
        return {sender.name: index for index, sender in enumerate(self.senders)}

    @cached_property
    def receivers(self) -> list[Receiver]:
        """List of all receivers: queries of heads, keys and values of groups, and MLP of each layer; then logits."""
        receivers = []
        for layer in range(len(self.n_heads)):
            receivers += [Receiver(layer, head, "q") for head in range(self.n_heads[layer])]
            shared = self.n_kv_heads[layer] < self.n_heads[layer]
            for what in ("k", "v"):
                receivers += [Receiver(layer, head, what, shared) for head in range(self.n_kv_heads[layer])]
            if self.mlps[layer] is not None:
                receivers.append(Receiver(layer, -1, "mlp"))
        return [*receivers, Receiver(len(self.n_heads), -1, "logits")]

    @cached_property
    def receiver_index(self) -> dict[Receiver, int]:
        """Dict from a receiver to its index in `receivers`."""
        return {receiver: index for index, receiver in enumerate(self.receivers)}

    @cached_property
    def kinds(self) -> dict[tuple[int, str], slice]:
        """Dict from (layer, input) to the slice of `receivers` with this layer and input.

        Inputs are "q", "k", "v", "mlp" and "logits".
        """
        kinds: dict[tuple[int, str], slice] = {}
        for place, receiver in enumerate(self.receivers):
            first = kinds.get((receiver.layer, receiver.input), slice(place, 0)).start
            kinds[receiver.layer, receiver.input] = slice(first, place + 1)
        return kinds

    @cached_property
    def receiver_inputs(self) -> list[tuple[tuple[int, str], ReceiverInput]]:
        """List of pairs ((layer, input), `ReceiverInput`), in the order of a forward pass.

        A `ReceiverInput` says how the receivers of one kind ("q", "k", "v", "mlp" or "logits") in a layer read the
        stream at one hook point. Gated attention has two entries for queries.
        """
        return [(kind, read) for kind in self.kinds for read in receiver_inputs(self.view, *kind)]

    @cached_property
    def writes(self) -> list[HeadWrites | None]:
        """List with a `HeadWrites` per layer, the maps from z to the stream; None for a layer without heads.

        The maps are in float32 or wider. z is the heads' output before W_O.
        """
        known = {layer: head_writes(self.view, layer, widened) for layer in self.view.layers}
        return [known.get(layer) for layer in range(self.view.n_layers)]

    @cached_property
    def numbers_held(self) -> int:
        """How many numbers store the writes of all senders on one token: z of heads, d_model for each other sender."""
        of_heads = sum(writes.w_o[..., 0].numel() for writes in self.writes if writes is not None)
        return of_heads + (len(self.senders) - sum(self.n_heads)) * self.view.d_model

    @cached_property
    def n_before_layer(self) -> list[int]:
        """List of the number of senders that write before each layer; the last entry is before the logits."""
        kinds = zip(self.n_heads, self.mixers, self.mlps, strict=True)
        return np.cumsum([1, *(n_heads + mixer + (mlp is not None) for n_heads, mixer, mlp in kinds)]).tolist()

    def n_before(self, receiver: Receiver) -> int:
        """Return the number of senders that write before a receiver reads; these are the first of `senders`."""
        mlp = self.mlps[receiver.layer] if receiver.input == "mlp" else None
        own = 0 if mlp is None or mlp.parallel else self.n_heads[receiver.layer] + self.mixers[receiver.layer]
        return self.n_before_layer[receiver.layer] + own

    @cached_property
    def possible(self) -> Bool[np.ndarray, "receivers senders"]:
        """Mask of the possible edges: True if the sender writes before the receiver reads."""
        before = np.array([self.n_before(receiver) for receiver in self.receivers])
        return np.arange(len(self.senders)) < before[:, None]

    def kept(self, edges: Any) -> Bool[np.ndarray, "receivers senders"]:
        """Return a new mask with True for the given edges and False for all others.

        `edges` is a table with columns `sender` and `receiver`, or a list of pairs of names. Raises ValueError for
        anything else, BadHead if the model does not have an edge.
        """
        mask = np.zeros_like(self.possible)
        mask[self.places(edges)] = True
        return mask

    def places(self, edges: Any) -> tuple[Int[np.ndarray, "edges"], Int[np.ndarray, "edges"]]:
        """Return the rows (receivers) and columns (senders) of the given edges in a mask over edges.

        `edges` is a table with columns `sender` and `receiver`, or a list of pairs of names. Raises ValueError for
        anything else, BadHead if sender or receiver does not exist or the sender does not write before the receiver
        reads.
        """
        known: dict[Any, int] = {receiver.name: row for row, receiver in enumerate(self.receivers)}
        rows, places = [], []
        for sender, receiver in _named(edges):
            sender = self._sender_name(sender)
            if receiver not in known:
                [end] = reached(self.view, [receiver])
                known[receiver] = self.receiver_index[end.receiver]
            if not self.possible[known[receiver], self.sender_index[sender]]:
                raise BadHead(
                    f"there is no edge from {sender} to {receiver}: the receiver reads before the sender writes; give "
                    "a receiver in a later layer"
                )
            rows.append(known[receiver])
            places.append(self.sender_index[sender])
        return np.array(rows, dtype=int), np.array(places, dtype=int)

    def _sender_name(self, given: str) -> str:
        """Return the name of the sender `given` as tables write it, such as "L1H0" for the user's "1.0".

        Raises BadHead for a sender that the model does not have.
        """
        if given in self.sender_index:
            return given
        try:
            sender = other_sender(self.view, given.strip()) or Sender(*one_head(self.view, given), "head")
        except BadHead as error:
            raise BadHead(f"{shown(given)} is not a sender of this model: {SENDER_FORMS}. {error}") from error
        if sender.name not in self.sender_index:
            raise BadHead(f"{given!r} is not a sender of this model: layer {sender.layer} has no MLP; leave it out")
        return sender.name

    def eap_name(self, edge: Edge) -> str:
        """Return the name of an edge in the notation of edge attribution patching (EAP), such as "a1.h2->logits".

        The benchmark MIB uses it too. If several heads share the receiver, return one name for each head, separated by
        commas. Mixers keep their name from this package, because EAP has none.
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
        """Return a mask of the edges of a circuit that lie on a path from the embedding to the logits.

        `mask` is the circuit: True for kept edges. A mixer counts as a start too, because it reads the whole stream.
        """
        reached = np.array([sender.kind in ("embedding", "mix") for sender in self.senders])
        for index, reads in enumerate(self._reads):
            reached[index] |= bool((mask[reads] & reached).any())
        return mask & reached & self.useful(mask)[:, None]

    @cached_property
    def coupled(self) -> list[bool]:
        """List with True for each layer in which a head's write depends on other heads of the layer.

        It does if a query/key norm takes its mean over all heads, or if a norm stands behind the attention.
        """
        coupled = []
        for layer, writes in enumerate(self.writes):
            norms = () if writes is None else (self.view.raw(layer).q_norm, self.view.raw(layer).k_norm)
            over_heads = any(norm is not None and norm.over_heads for norm in norms)
            coupled.append(over_heads or (writes is not None and writes.norm.kind != "none"))
        return coupled

    def useful(
        self, mask: Bool[np.ndarray, "receivers senders"], *, by_norms: bool = False
    ) -> Bool[np.ndarray, "receivers"]:
        """Return True for receivers from which a path of the circuit leads to the logits, and for the logits.

        `mask` is the circuit: True for kept edges. `by_norms`: a path may also lead from one head to another head of a
        `coupled` layer.
        """
        read_whole = False  # becomes True once a useful mixer reads the whole stream
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
        """List with the indices of each sender's own receivers: a head's q, k and v, or an MLP's input."""
        return [self._reads_of(sender) for sender in self.senders]

    def _reads_of(self, sender: Sender) -> list[int]:
        """Return the indices of the receivers through which this sender reads; empty for embedding and mixer."""
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
    """Return a list of pairs (name of the sender, name or `Receiver` of the receiver), one for each edge.

    `edges` is a table or a list of pairs of names. Raises ValueError for anything else, and for a value with two
    readings, such as two lists.
    """
    if isinstance(edges, pd.DataFrame):
        if edges.empty:
            return []
        require(edges, _ENDS, "edge_effects", name="table of edges")
    of_columns = isinstance(edges, Mapping) and all(values(edges.get(name)) is not None for name in _ENDS)
    if of_columns or set(_ENDS) <= set(column_names(edges) or []):
        edges = zip(*columns_of(edges, _ENDS), strict=True)
    if are_columns(edges):
        raise ValueError(
            f"edges= as a {type(edges).__name__} of {len(edges)} lists or arrays has two readings: all senders and all "
            "receivers, or one edge in each. Write list(zip(senders, receivers)) for the first, and a list of tuples "
            "(sender, receiver) for the second"
        )
    listed = None if isinstance(edges, str) else values(edges)
    named = []
    for edge in [edges] if listed is None else listed:
        fields = named_fields(edge) or {}
        ends = [fields[name] for name in _ENDS] if set(_ENDS) <= set(fields) else values(edge) or []
        if len(ends) != 2 or not isinstance(ends[0], str) or not isinstance(ends[1], str | Receiver):
            raise ValueError(
                "edges= must be a table of edge_effects, or a list of pairs of names (sender, receiver), such as "
                f"[('L16H0', 'L18KV2.k')]; found {shown(edge)}"[:300]
                + naming_nodes(edge)
            )
        named.append((ends[0], ends[1]))
    return named
