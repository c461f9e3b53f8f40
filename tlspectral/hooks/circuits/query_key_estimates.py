"""Estimates of edges into queries and keys by the attention that they change, its softmax taken anew.

A gradient at queries and keys says what a small step does. Where a softmax is saturated such a step changes nothing,
and the whole step much. Here the whole change of queries or keys is made, and the softmax of the rows that read them is
taken anew; behind the attention the estimate is of first order. After AtP* (Kramár et al. 2024, "AtP*: An efficient and
scalable method for localizing LLM behaviour to components", section 3.1.1), which does so for nodes.
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

_OF_HELD = 16  # share of what a batch may hold that changes of queries and keys take


def taken_anew(view: AttentionView) -> list[tuple[int, Input]]:
    """Return layer and input of the queries and keys that change the attention of their own heads alone.

    A norm of queries or keys over all heads (OLMo 2) hands a change on to the others. Raises EditNotHonored for a model
    whose output does not depend on the z that it shows.
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
    """Return the attention of one layer in a run, from what passed its `READ_POINTS`, on the device of the run.

    Raises ScoreMismatch where the attention of the run does not follow from its queries and keys (learned sinks, hooks
    that edit scores), ValueError past the length up to which the layer's score scale holds, UnsupportedArchitecture for
    a layer that cannot be read.
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
    """Return the gradient in the attention of a layer, from what passed z, the gradient there, and the values.

    That is `of_z_i . v_j`, also in a bridge that shows its attention and takes up no edit of it. Raises ScoreMismatch
    where z is not the attention times the values (a hook that edits it).
    """
    by_head, of_z = (widened(each).reshape(*each.shape[:2], layer.query.shape[2], -1) for each in (z, of_z))
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
        f"layer {layer.index}: the z of the run differs from that of its attention and values",
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
    """Return the change of the attention when an edge is cut, times the gradient in the attention, summed.

    An edge into a query changes a row of the head's attention for each position at which it is cut, an edge into a key
    a column: with edges cut at all positions all keys change at once, in all heads that share them, and each row is
    taken anew with all of them. `removed` is what the first senders write at the last positions, in front of which
    nothing is removed, and an edge is cut at those that are `counted`.
    """
    n_heads, n_positions = gradient.shape[1:3]
    first = n_positions - counted.shape[1]
    x, counted = layer.residual[:, first:], counted[..., None].to(layer.residual)
    rows = torch.arange(first, n_positions, device=x.device).expand(len(x), -1)
    of_rows = gradient[:, :, first:].to(x)
    before = [layer.weights(head, rows) for head in range(n_heads)]
    columns = layer.query.shape[2] * layer.query.shape[3] + n_positions
    at_once = max(1, batch_on(x.device).held // (_OF_HELD * rows.numel() * columns * x.element_size()))
    found = x.new_zeros(len(x), n_receivers, n_senders)
    for start in range(0, n_senders, at_once):
        some = slice(start, min(start + at_once, n_senders))
        change = change_of_reads(layer.reads, x, removed.written(some).to(x) * counted)
        if layer.what == "k":
            change = functional.pad(change, (0, 0, 0, 0, first, 0))
        for head in range(n_heads):
            moved = layer.weights(head, rows, change).sub_(before[head])
            found[:, head * n_receivers // n_heads, some] += torch.einsum("sbij,bij->bs", moved, of_rows[:, head])
    return found
