"""Receivers of edges in a model: their names in tables, and the heads whose input changes when one is edited."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tlspectral.containers import values
from tlspectral.errors import BadHead, shown, warn_caller
from tlspectral.models.reading.heads_of_model import heads_by_layer
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.mlp import mlp_reads
from tlspectral.selection.heads_as_written import from_end, which_exist
from tlspectral.selection.node_names import Receiver, head_name
from tlspectral.selection.receivers_as_written import RECEIVER_FORMS, Receivers, read_receivers

_NAMES = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class Reached:
    """A receiver of a model, the query heads that the user named, and the query heads that an edit changes.

    Attributes:
        receiver: the receiver as tables name it. Keys or values that heads share, also through a latent, are one
            receiver.
        asked: query heads that the user named; for the name of a group of heads, all heads of the group.
        heads: query heads whose queries, keys or values change with an edit: all heads that share them, and every head
            of a layer whose query/key norm runs over all heads (OLMo 2).
    """

    receiver: Receiver
    asked: tuple[int, ...]
    heads: tuple[int, ...]


def reached(view: AttentionView, receivers: Receivers) -> list[Reached]:
    """Return the receivers that a user named, in any form, without duplicates, sorted by layer, input and head.

    `view` is the model. An entry has the receiver as tables name it, the heads that the user named and the heads that
    an edit changes. Raises BadHead for a receiver that does not exist, UnsupportedArchitecture if its layer uses its
    keys as values.
    """
    asked: dict[Receiver, set[int]] = {}
    for named in _receivers_in(view, receivers):
        own, heads = _own(view, named)
        asked.setdefault(own, set()).update(heads)
    order = sorted(asked, key=lambda receiver: (receiver.layer, receiver.input, receiver.head))
    return [Reached(receiver, tuple(sorted(asked[receiver])), _changed(view, receiver)) for receiver in order]


def _receivers_in(view: AttentionView, receivers: Receivers) -> list[Receiver]:
    """Return the receivers that a user named, without duplicates, in the order given.

    Heads of `{"k": heads}` are in the order of the model. Raises BadHead for values that are not receivers, and for
    heads that do not exist.
    """
    if not isinstance(receivers, Mapping):
        return read_receivers(receivers)
    if "receiver" in receivers and values(receivers["receiver"]) is not None:  # columns of a table
        return read_receivers(values(receivers["receiver"]) or [])
    wrong = [input for input in receivers if input not in ("q", "k", "v")]
    if wrong:
        raise BadHead(f"{shown(receivers)} names no receivers: {RECEIVER_FORMS}")
    return [
        Receiver(layer, head, input)  # type: ignore[arg-type]
        for input, heads in receivers.items()
        for layer, some in heads_by_layer(view, heads).items()
        for head in some
    ]


def _own(view: AttentionView, named: Receiver) -> tuple[Receiver, Iterable[int]]:
    """Return a receiver as the model has it, and the query heads that the user named with it.

    `named` is the receiver as the user wrote it; keys of a head that shares them become keys of its group. Raises
    BadHead if it does not exist.
    """
    layer, head, what, shared = named
    if what == "logits":
        return Receiver(view.n_layers, -1, what), ()
    known = from_end(layer, view.n_layers)
    if known is None:
        raise BadHead(f"{named.name} does not exist: the model has layers {which_exist(layer, view.n_layers)}")
    layer = known
    if what == "mlp":
        if mlp_reads(view, layer) is None:
            raise BadHead(f"{named.name} does not exist: layer {layer} has no MLP; leave it out")
        return Receiver(layer, -1, what), ()
    raw = view.raw(layer)
    require_own_projections(raw, layer)
    n_heads, n_kv_heads = len(raw.w_q), raw.n_kv_receivers
    n_own = n_kv_heads if shared else n_heads
    index = from_end(head, n_own)
    if index is None:
        kind = "key/value heads" if shared else "heads"
        raise BadHead(f"{named.name} does not exist: layer {layer} has {kind} {which_exist(head, n_own)}")
    head = index
    size = n_heads // n_kv_heads
    if what == "q" or size == 1:
        return Receiver(layer, head, what), [head]
    if shared:
        return Receiver(layer, head, what, True), range(head * size, (head + 1) * size)
    return Receiver(layer, head // size, what, True), [head]


def _changed(view: AttentionView, receiver: Receiver) -> tuple[int, ...]:
    """Return the query heads whose input changes with an edit of the receiver; an empty tuple for MLPs and logits.

    `view` is the model.
    """
    if receiver.head < 0:
        return ()
    raw = view.raw(receiver.layer)
    norm = {"q": raw.q_norm, "k": raw.k_norm, "v": None}[receiver.input]
    if norm is not None and norm.over_heads:
        return tuple(range(len(raw.w_q)))
    size = len(raw.w_q) // raw.n_kv_receivers if receiver.shared else 1
    return tuple(range(receiver.head * size, (receiver.head + 1) * size))


def refuse_order(senders: dict[int, list[int]], receivers: list[Reached]) -> None:
    """Raise ValueError if a receiver reads before a sender writes, BadHead if a receiver is an MLP or the logits.

    `senders`: dict from layer to the heads that write.
    """
    if not senders or not receivers:
        return
    without_heads = [end.receiver.name for end in receivers if not end.heads]
    if without_heads:
        raise BadHead(
            f"{without_heads[0]}: into= takes queries, keys and values; to cut edges into MLPs or logits use "
            "tls.edge_effects"
        )
    last, first = max(senders), min(receivers, key=lambda end: end.receiver.layer).receiver
    if last >= first.layer:
        raise ValueError(
            f"{first.name} reads before {head_name(last, senders[last][0])} writes: into= takes receivers in later "
            "layers than all of `heads`; heads of one layer read the same residual stream"
        )


def warn_of_other_heads(receivers: list[Reached]) -> None:
    """Warn once per layer and input if an edit of these receivers also changes heads that the user did not name.

    The message names these heads, and the receivers to name instead.
    """
    of_layer: dict[tuple[int, str], list[Reached]] = {}
    for end in receivers:
        of_layer.setdefault((end.receiver.layer, end.receiver.input), []).append(end)
    for (layer, what), ends in of_layer.items():
        asked = sorted({head for end in ends for head in end.asked})
        others = sorted({head for end in ends for head in end.heads} - set(asked))
        if others:
            warn_caller(
                f"the {_NAMES[what]} of {_names(layer, asked)} cannot be edited alone: the edit also reaches "
                f"{_names(layer, others)} (these heads share keys and values, a latent or a query/key norm). "
                f"Effects belong to all of them; to avoid this warning name the receiver "
                f"{', '.join(end.receiver.name for end in ends)}"
            )


def _names(layer: int, heads: Any) -> str:
    return ", ".join(head_name(layer, head) for head in heads)
