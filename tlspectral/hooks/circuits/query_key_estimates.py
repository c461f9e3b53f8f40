"""Estimates of edges into queries and keys ("EAP-QK"): the softmax of attention is computed again.

A gradient at queries and keys describes a small step. If a softmax is saturated, a small step changes nothing and the
whole step much. Here the whole change of queries or keys is made, and the softmax of the affected rows is computed
again. Behind the attention the estimate stays first-order. Source: AtP* (Kramár et al. 2024, "AtP*: An efficient and
scalable method for localizing LLM behaviour to components", section 3.1.1), which does this for nodes.
"""

import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from tlspectral.algebra.rotary import widened
from tlspectral.errors import ScoreMismatch
from tlspectral.hooks.circuits.held_writes import HeldWrites
from tlspectral.hooks.edges.measuring import ReceiverLayer, receiver_layer
from tlspectral.hooks.probe import require_honoured
from tlspectral.models.attention.tolerances import LOOK_FOR_HOOKS, require_close
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import batch_on
from tlspectral.models.stream.writes import Input, change_of_reads

_OF_HELD = 16  # changes of queries and keys take 1/16 of the memory of a batch


def taken_anew(view: AttentionView) -> list[tuple[int, Input]]:
    """Return the kinds of receivers, (layer, "q") or (layer, "k"), whose attention can be computed again.

    Layers whose query/key norm takes its mean over all heads (OLMo 2) are left out: an edge into one head changes other
    heads there. Raises EditNotHonored if the model's output does not depend on the z (heads' output before W_O) that it
    shows.
    """
    kinds: list[tuple[int, Input]] = []
    for layer in view.layers:
        raw = view.raw(layer)
        if raw.q_norm is None or not raw.q_norm.over_heads:
            kinds.append((layer, "q"))
        if raw.k_norm is None or not raw.k_norm.over_heads:
            kinds.append((layer, "k"))
    for layer in dict.fromkeys(layer for layer, _ in kinds):
        require_honoured(view, layer, "z")
    return kinds


def attention_of(view: AttentionView, captured: dict[str, Tensor], index: int, what: Input) -> ReceiverLayer:
    """Return the attention of layer `index` in a run as a `ReceiverLayer`, in which queries or keys can be changed.

    `view` is the model. `what` is the input that can be changed, "q" or "k". `captured` has the activations at the
    layer's attention hook points, by hook name. Raises ScoreMismatch if the attention of the run does not follow from
    its queries and keys (learned sinks, hooks that edit scores), ValueError for prompts longer than the layer's score
    scale allows, UnsupportedArchitecture for a layer that cannot be read.
    """
    layer = receiver_layer(view, captured, index, what, widened)
    rows = torch.arange(layer.query.shape[1], device=layer.query.device).expand(len(layer.query), -1)
    for head in range(layer.query.shape[2]):
        layer.require_own_pattern(head, rows)
    return layer


def gradient_of_attention(
    layer: ReceiverLayer,
    z: Float[Tensor, "batch pos *width"],
    of_z: Float[Tensor, "batch pos *width"],
    values: Float[Tensor, "batch pos *width_of_values"],
) -> Float[Tensor, "batch heads pos pos"]:
    """Return the gradient of the metric in the attention weights of a layer: of_z_i . v_j for query i and key j.

    `layer` is the attention of the run. z is the heads' output before W_O in the run, `of_z` the gradient there,
    `values` the value vectors v. Raises ScoreMismatch if z is not attention times values (a hook edits it).
    """
    # Computed from z because a bridge may show its attention without using edits of it.
    by_head, of_z = (widened(side).reshape(*side.shape[:2], layer.query.shape[2], -1) for side in (z, of_z))
    values = widened(values).reshape(*values.shape[:2], -1, by_head.shape[3])
    values = values.repeat_interleave(by_head.shape[2] // values.shape[2], dim=2)
    rebuilt = einsum(
        layer.pattern.to(values), values, "batch head query key, batch key head d_head -> batch query head d_head"
    )
    off, size = ((x.flatten(2).norm(dim=-1)) for x in (rebuilt - by_head, by_head))
    require_close(
        off,
        size.clamp_min(size.mean()),
        z.dtype,
        "live z",
        f"layer {layer.index}: the z of the run differs from its attention times its values",
        LOOK_FOR_HOOKS,
        ScoreMismatch,
    )
    return einsum(of_z, values, "batch query head d_head, batch key head d_head -> batch head query key")


def attention_effects(
    layer: ReceiverLayer,
    removed: HeldWrites,
    n_senders: int,
    counted: Bool[Tensor, "batch late"],
    gradient: Float[Tensor, "batch heads pos pos"],
    n_receivers: int,
) -> Float[Tensor, "batch receivers senders"]:
    """Return, for each edge, the sum over attention weights of (change when the edge is cut) times (gradient).

    Args:
        layer: the attention of a layer in the run, for queries or keys.
        removed: clean minus counterfactual writes of the senders at the last positions; nothing differs before these.
        n_senders: the first so many senders have an edge into the layer.
        counted: which of the last positions have the edge cut, as booleans.
        gradient: gradient of the metric in the attention weights.
        n_receivers: receivers of this kind in the layer: heads, or groups of heads that share keys.
    """
    # A cut edge into queries changes one row of the attention per position. A cut edge into keys changes keys at all
    # cut positions at once, in all heads that share them.
    n_heads, n_positions = gradient.shape[1:3]
    first = n_positions - counted.shape[1]
    x, counted = layer.residual[:, first:], counted[..., None].to(layer.residual)
    rows = torch.arange(first, n_positions, device=x.device).expand(len(x), -1)
    of_rows = gradient[:, :, first:].to(x)
    before = [layer.weights(head, rows) for head in range(n_heads)]
    columns = layer.query.shape[2] * layer.query.shape[3] + n_positions
    at_once = max(1, batch_on(x.device).held // (_OF_HELD * rows.numel() * columns * x.element_size()))
    effects = x.new_zeros(len(x), n_receivers, n_senders)
    for start in range(0, n_senders, at_once):
        some = slice(start, min(start + at_once, n_senders))
        change = change_of_reads(layer.reads, x, removed.written(some).to(x) * counted)
        if layer.what == "k":
            change = functional.pad(change, (0, 0, 0, 0, first, 0))
        for head in range(n_heads):
            moved = layer.weights(head, rows, change).sub_(before[head])
            effects[:, head * n_receivers // n_heads, some] += torch.einsum("sbij,bij->bs", moved, of_rows[:, head])
    return effects
