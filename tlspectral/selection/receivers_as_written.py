"""Read the ends of edges (receivers) in every form in which users write them."""

from __future__ import annotations

import re
from typing import Any, Literal

from tlspectral.containers import column_names, columns_of, plain, values
from tlspectral.errors import BadHead, not_a, shown
from tlspectral.errors.settings import checked_settings
from tlspectral.selection.heads_as_written import Head, Heads, named_head, named_heads, refuse_head
from tlspectral.selection.node_names import Receiver, group_name, naming_nodes

_RECEIVER = re.compile(r"L?(-?\d+)(H|\.|KV)(-?\d+)\.([qkv])", re.IGNORECASE)

_MLP = re.compile(r"L?(-?\d+)\.?MLP", re.IGNORECASE)

RECEIVER_FORMS = (
    'a receiver is "L18H6.q", "L18H6.k" or "L18KV2.k" (also .v), "L3MLP" or "logits"; the keys of heads are '
    '{"k": heads}'
)

Receivers = Any
"""Receivers: `"L18H6.q"`, `"L18KV2.k"`, `"L3MLP"`, `"logits"`, a list of these, a frame with a column `receiver`, or
`{"k": heads}` with `Heads` in any form, for the keys of these heads; also `"q"` and `"v"`."""


@checked_settings
def receivers(heads: Heads, input: Literal["q", "k", "v"]) -> list[str]:
    """Return names of the queries, keys or values of heads, for `into=` of `tls.ablate` and for `tls.edge_effects`.

    >>> import tlspectral as tls
    >>> tls.hooks.receivers(["L1H0", (1, 2)], "k")
    ['L1H0.k', 'L1H2.k']

    Args:
        heads: "L5H1", (5, 1), a table row, a list of heads, or a DataFrame with `layer` and `head`. "L5KV1" gives the
            keys or values of the group. "L5" is refused, because the number of heads is not known without a model.
        input: "q" (queries), "k" (keys) or "v" (values).

    Returns:
        List with a name per head in the given order, such as "L1H0.k". If heads share keys or values, a function that
            gets a model reads this name as the shared receiver, "L1KV0.k".

    Raises:
        BadHead: heads in none of these forms, all heads of a layer, or the queries of a group. Whether a model has the
            heads is not checked here.
        ValueError: another input.
    """
    if input not in ("q", "k", "v"):
        raise ValueError(f"input must be 'q', 'k' or 'v' (queries, keys or values), not {shown(input)}")
    named = named_heads(heads)
    for one in named:
        if one.head is None and (one.group is None or input == "q"):
            refuse_head(one.name)
    return [f"{one.name}.{input}" for one in named]


def read_receivers(given: Receivers) -> list[Receiver]:
    """Return a list of `Receiver`s (inputs of heads, MLPs, the logits) in the given order, without duplicates.

    `given`: "L18H6.q", "L18KV2.k", "L3MLP", "logits", a list of these, or a frame with a column `receiver`. Raises
    BadHead for anything else.
    """
    given = plain(given)
    if column_names(given) is not None:
        given = named_column(given, "receiver", RECEIVER_FORMS)
    listed = [given] if isinstance(given, str | Receiver) else values(given)
    if listed is None:
        raise BadHead(f"{not_a(given, 'receivers')}: {RECEIVER_FORMS}{naming_nodes(given)}")
    return list(dict.fromkeys(map(_receiver, listed)))


def named_column(frame: Any, name: str, forms: str) -> list[Any]:
    """Return the column `name` of a frame of any library as a list.

    Raises BadHead if the frame has no such column; the message ends with `forms`, the forms that are allowed.
    """
    if name not in (column_names(frame) or []):
        raise BadHead(f"a {type(frame).__name__} without a column {name} names no {name}s: {forms}")
    try:
        return columns_of(frame, [name])[0]
    except TypeError as error:
        raise BadHead(str(error)) from error


def head_and_input(given: Head | Receiver) -> tuple[str, Literal["q", "k", "v"]]:
    """Return the name of a head (or key/value group) and one of its inputs, ("L5H1", "q").

    `given`: a name such as "L5H1.q", a `Receiver`, or a head such as "L5H1", which stands for its keys. Raises BadHead
    for anything else.
    """
    if not isinstance(given, Receiver) and not (isinstance(given, str) and given.strip()[-1:] in tuple("qkvQKV")):
        return named_head(given).name, "k"
    [end] = read_receivers(given)
    return group_name(end.layer, end.head) if end.shared else named_head(end).name, end.input


def _receiver(given: Any) -> Receiver:
    """Return the `Receiver` (end of an edge) that a name such as "L18H6.q" or "logits" stands for; a `Receiver` is
    returned unchanged.

    Raises BadHead for anything else.
    """
    if isinstance(given, Receiver):
        return given
    if isinstance(given, str) and given.strip().lower() == "logits":
        return Receiver(-1, -1, "logits")
    if isinstance(given, str) and (mlp := _MLP.fullmatch(given.strip())) is not None:
        return Receiver(int(mlp[1]), -1, "mlp")
    match = _RECEIVER.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None or (match[2].upper() == "KV" and match[4].lower() == "q"):
        raise BadHead(f"{not_a(given, 'a receiver')}: {RECEIVER_FORMS}{naming_nodes(given)}")
    input: Any = match[4].lower()
    return Receiver(int(match[1]), int(match[3]), input, match[2].upper() == "KV")
