"""Heads that a user names, as numbers of layers and heads that a model has."""

from typing import Any

from tlspectral.errors import BadHead
from tlspectral.selection.heads_as_written import (
    Head,
    Heads,
    from_end,
    group_heads,
    named_head,
    named_heads,
    only_pair,
    which_exist,
)


def heads_by_layer(view: Any, heads: Heads | None) -> dict[int, list[int]]:
    """Return the chosen heads as a dict from layer to a list of heads, all sorted, without duplicates.

    view: an `AttentionView` or `WeightFiles`. heads: names such as "L5H1", (layer, head), "L5" for every head of layer
    5, "L5KV1" for the query heads of a key/value group, or a list of these; None: all heads. Raises BadHead if a layer,
    head or group does not exist, or if `heads` has another form.
    """
    if heads is None:
        return {layer: list(range(view.n_heads(layer))) for layer in view.layers}
    chosen: dict[int, set[int]] = {}
    for named in named_heads(heads):
        index = from_end(named.layer, view.n_layers)
        if index is None:
            raise BadHead(
                f"{named.name} does not exist: the model has layers {which_exist(named.layer, view.n_layers)}"
            )
        n_heads, wanted = view.n_heads(index), chosen.setdefault(index, set())
        if named.group is not None:
            wanted.update(group_heads(named._replace(layer=index), n_heads, view.heads_per_group(index)))
            continue
        if named.head is None:
            wanted.update(range(n_heads))
            continue
        if (counted := from_end(named.head, n_heads)) is None:
            raise BadHead(f"{named.name} does not exist: layer {index} has heads {which_exist(named.head, n_heads)}")
        wanted.add(counted)
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def one_head(view: Any, head: Head) -> tuple[int, int]:
    """Return (layer, head) of one head, both counted from 0.

    view: an `AttentionView` or `WeightFiles`. head: a name such as "L5H1", or (layer, head); "L5KV1" if no other head
    shares its keys. Raises BadHead if it does not exist, or is a group of several heads.
    """
    named = named_head(head)
    [(layer, heads)] = heads_by_layer(view, [named.name]).items()
    return only_pair([(layer, index) for index in heads], named.name)
