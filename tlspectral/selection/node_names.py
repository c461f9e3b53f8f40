"""Names of heads, key/value groups, layers and receivers, as tables and messages have them."""

from __future__ import annotations

from typing import Any, NamedTuple


def head_name(layer: int, head: int) -> str:
    """Return the name of a head as in tables: L12H0."""
    return f"L{layer}H{head}"


def group_name(layer: int, group: int) -> str:
    """Return the name of a key/value group: L12KV0."""
    return f"L{layer}KV{group}"


class NamedHeads(NamedTuple):
    """The heads that one name stands for: a head, a key/value group, or all heads of a layer.

    Numbers may be negative (counted from the end), because the model is not known.

    Attributes:
        layer: number of the layer.
        head: number of the head; None for a group or layer.
        group: number of the key/value group; None for a head or layer.
    """

    layer: int
    head: int | None = None
    group: int | None = None

    @property
    def name(self) -> str:
        """The name in messages: L5H1, L5KV1 or L5."""
        if self.head is not None:
            return head_name(self.layer, self.head)
        return f"L{self.layer}" if self.group is None else group_name(self.layer, self.group)


class Receiver(NamedTuple):
    """The end of an edge: queries, keys or values of a head, an MLP, or the logits.

    Attributes:
        layer: for the logits the number of layers, or -1 if the model is not known.
        head: number of the query head, or of the key/value head if `shared`; -1 for an MLP and the logits.
        input: "q", "k", "v", "mlp" or "logits".
        shared: True for keys or values that several heads share.
    """

    layer: int
    head: int
    input: Any
    shared: bool = False

    @property
    def name(self) -> str:
        """Name in tables: L18H6.q, L18KV2.k (shared by heads), L3MLP or logits."""
        if self.input in ("mlp", "logits"):
            return f"L{self.layer}MLP" if self.input == "mlp" else "logits"
        return f"L{self.layer}{'KV' if self.shared else 'H'}{self.head}.{self.input}"


_NODES = {
    "embed": "embedding", "attn_head_out": "L{layer}H{head}", "mlp_out": "L{layer}MLP", "mlp_in": "L{layer}MLP",
    "q_input": "L{layer}H{head}.q", "k_input": "L{layer}H{head}.k", "v_input": "L{layer}H{head}.v", "logits": "logits",
}  # fmt: skip


def naming_nodes(given: Any) -> str:
    """Return the end of a message with our names for a node or edge of TransformerLens; "" for anything else.

    For several nodes or edges it names the first, for an AttributionResult the one with the largest score.
    """
    if hasattr(given, "node_scores") and (scores := given.edge_scores or given.node_scores) is not None:
        largest = naming_nodes(max(scores, key=lambda node: abs(scores[node]))) if scores else ""
        held = "edges" if given.edge_scores else "nodes alone"
        return f"; an {type(given).__name__} of TransformerLens has {held}{largest.replace(';', ',', 1)}"
    ends = [*given][:2] if isinstance(given, list | tuple | dict) else [given]
    if ends and isinstance(ends[0], list | tuple):
        return naming_nodes(ends[0])
    known = (end for end in ends if hasattr(end, "position") and getattr(end, "kind", None) in _NODES)
    names = [_NODES[node.kind].format(layer=node.layer, head=node.head) for node in known]
    listed = repr(tuple(names)) if len(names) > 1 else "".join(map(repr, names))
    return (
        f"; instead of TransformerLens' nodes, which have one position each, give the names: {listed}" if names else ""
    )
