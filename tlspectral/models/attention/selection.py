"""Heads that a caller chose, checked against the model and grouped by layer."""

from typing import TYPE_CHECKING

from tlspectral.errors import BadHead
from tlspectral.models.attention.view import AttentionView
from tlspectral.selection import Heads, head_pairs, whole_layers

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers


def heads_by_layer(view: "AttentionView | CheckpointLayers", heads: Heads | None) -> dict[int, list[int]]:
    """Return the chosen heads by layer (None: all), layers and heads sorted, each head once; "L5" is all of a layer.

    Raises BadHead for a layer or head that does not exist, or heads in no form of `tlspectral.selection.Heads`.
    """
    if heads is None:
        return {layer: list(range(view.n_heads(layer))) for layer in view.layers}
    layers, others = whole_layers(heads)
    pairs = set(head_pairs(others, view.n_layers))
    for layer in layers:
        if not -view.n_layers <= layer < view.n_layers:
            raise BadHead(f"L{layer} does not exist: the model has layers 0 to {view.n_layers - 1}")
        pairs |= {(layer % view.n_layers, head) for head in range(view.n_heads(layer % view.n_layers))}
    chosen: dict[int, list[int]] = {}
    for layer, head in sorted(pairs):
        if not 0 <= layer < view.n_layers:
            raise BadHead(f"L{layer}H{head} does not exist: the model has layers 0 to {view.n_layers - 1}")
        chosen.setdefault(layer, []).append(head)
    for layer, indices in chosen.items():
        n_heads = view.n_heads(layer)
        wrong = [head for head in indices if not 0 <= head < n_heads]
        if wrong:
            raise BadHead(f"L{layer}H{wrong[0]} does not exist: layer {layer} has heads 0 to {n_heads - 1}")
    return chosen
