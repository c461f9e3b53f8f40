"""What TransformerLens' attribution patching returns: its own classes from 4.3 on, and the same by name before."""

from dataclasses import dataclass, field
from typing import Any, get_args

from transformer_lens.tools.analysis import attribution_patching as own

HAS_EDGES = "q_input" in get_args(own.NodeKind)


@dataclass(frozen=True)
class _Node:
    kind: str
    position: int
    layer: int | None = None
    head: int | None = None


@dataclass
class AttributionResult:
    node_scores: dict[Any, float]
    edge_scores: dict[Any, float] = field(default_factory=dict)


if HAS_EDGES:
    AttributionResult = own.AttributionResult
Node: Any = own.Node if HAS_EDGES else _Node

HEAD, QUERY = Node("attn_head_out", 3, 0, 1), Node("q_input", 3, 1, 2)
EMBED, LOGITS = Node("embed", 5), Node("logits", 5, 1)
NODES = AttributionResult({EMBED: 0.1, HEAD: -1.0})
EDGES = AttributionResult({}, {(EMBED, LOGITS): 0.1, (HEAD, QUERY): -1.0})
