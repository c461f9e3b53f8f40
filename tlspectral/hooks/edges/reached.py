"""Receivers of edges in a model: which heads each of them reaches, and the names that tables print."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tlspectral.containers import values
from tlspectral.errors import BadHead, warn_caller
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.stream.mlp import mlp_reads
from tlspectral.selection import (
    RECEIVER_FORMS,
    Receiver,
    Receivers,
    from_end,
    head_name,
    read_receivers,
    which_exist,
)

_NAMES = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class Reached:
    """A receiver of a model, the query heads that were asked for, and those that an edit of it reaches.

    Attributes:
        receiver: under its name in tables: keys and values that heads share are one receiver, also as a latent.
        asked: query heads; all that read it where it is given by the name of the group.
        heads: query heads whose queries, keys or values change: those that share them, and every head of a layer whose
            query/key norm runs over all heads (OLMo 2).
    """

    receiver: Receiver
    asked: tuple[int, ...]
    heads: tuple[int, ...]


def reached(view: AttentionView, given: Receivers) -> list[Reached]:
    """Return the receivers, sorted by layer, input and head, each once, with the heads that they reach.

    Raises BadHead for a receiver that does not exist, UnsupportedArchitecture for one whose values are its keys.
    """
    asked: dict[Receiver, set[int]] = {}
    for one in _receivers_in(view, given):
        own, heads = _own(view, one)
        asked.setdefault(own, set()).update(heads)
    order = sorted(asked, key=lambda one: (one.layer, one.input, one.head))
    return [Reached(one, tuple(sorted(asked[one])), _changed(view, one)) for one in order]


def _receivers_in(view: AttentionView, given: Receivers) -> list[Receiver]:
    """Return receivers of a model in their order, each once; of `{"k": heads}` those heads in the order of the model.

    Raises BadHead for what names no receiver, or no head of the model.
    """
    if not isinstance(given, Mapping):
        return read_receivers(given)
    if "receiver" in given and values(given["receiver"]) is not None:  # columns of a table
        return read_receivers(values(given["receiver"]) or [])
    wrong = [input for input in given if input not in ("q", "k", "v")]
    if wrong:
        raise BadHead(f"{given!r} names no receivers: {RECEIVER_FORMS}")
    return [
        Receiver(layer, head, input)  # type: ignore[arg-type]
        for input, heads in given.items()
        for layer, some in heads_by_layer(view, heads).items()
        for head in some
    ]


def _own(view: AttentionView, given: Receiver) -> tuple[Receiver, Iterable[int]]:
    """Return a receiver under its name in the model, and the query heads that are asked for."""
    layer, head, what, shared = given
    if what == "logits":
        return Receiver(view.n_layers, -1, what), ()
    known = from_end(layer, view.n_layers)
    if known is None:
        raise BadHead(f"{given.name} does not exist: the model has layers {which_exist(layer, view.n_layers)}")
    layer = known
    if what == "mlp":
        if mlp_reads(view, layer) is None:
            raise BadHead(f"{given.name} does not exist: layer {layer} has no MLP")
        return Receiver(layer, -1, what), ()
    raw = view.raw(layer)
    require_own_projections(raw, layer)
    n_heads, n_kv_heads = len(raw.w_q), raw.n_kv_receivers
    n_own = n_kv_heads if shared else n_heads
    index = from_end(head, n_own)
    if index is None:
        kind = "key/value heads" if shared else "heads"
        raise BadHead(f"{given.name} does not exist: layer {layer} has {kind} {which_exist(head, n_own)}")
    head = index
    size = n_heads // n_kv_heads
    if what == "q" or size == 1:
        return Receiver(layer, head, what), [head]
    if shared:
        return Receiver(layer, head, what, True), range(head * size, (head + 1) * size)
    return Receiver(layer, head // size, what, True), [head]


def _changed(view: AttentionView, receiver: Receiver) -> tuple[int, ...]:
    if receiver.head < 0:
        return ()
    raw = view.raw(receiver.layer)
    norm = {"q": raw.q_norm, "k": raw.k_norm, "v": None}[receiver.input]
    if norm is not None and norm.over_heads:
        return tuple(range(len(raw.w_q)))
    size = len(raw.w_q) // raw.n_kv_receivers if receiver.shared else 1
    return tuple(range(receiver.head * size, (receiver.head + 1) * size))


def refuse_order(senders: dict[int, list[int]], receivers: list[Reached]) -> None:
    """Raise a ValueError for a receiver that reads before a sender writes, BadHead for an MLP or the logits."""
    if not senders or not receivers:
        return
    of_none = [one.receiver.name for one in receivers if not one.heads]
    if of_none:
        raise BadHead(
            f"{of_none[0]}: into= takes queries, keys and values; MLPs and logits are receivers of edge_effects"
        )
    last, first = max(senders), min(receivers, key=lambda one: one.receiver.layer).receiver
    if last >= first.layer:
        raise ValueError(
            f"{first.name} reads before {head_name(last, senders[last][0])} writes: into= takes receivers in later "
            "layers than all of `heads`; heads of one layer read the same residual stream"
        )


def warn_of_other_heads(receivers: list[Reached]) -> None:
    """Warn by name of heads that are reached though they were not asked for."""
    of_layer: dict[tuple[int, str], list[Reached]] = {}
    for one in receivers:
        of_layer.setdefault((one.receiver.layer, one.receiver.input), []).append(one)
    for (layer, what), some in of_layer.items():
        asked = sorted({head for one in some for head in one.asked})
        others = sorted({head for one in some for head in one.heads} - set(asked))
        if others:
            warn_caller(
                f"the {_NAMES[what]} of {_names(layer, asked)} cannot be edited alone: the edit also reaches "
                f"{_names(layer, others)} (heads of a group share keys and values, those of latent attention a latent, "
                f"and a query/key norm over all heads ties those of a layer), so an effect is that of all of them; "
                f"name the receiver {', '.join(one.receiver.name for one in some)} where that is meant"
            )


def _names(layer: int, heads: Any) -> str:
    return ", ".join(head_name(layer, head) for head in heads)
