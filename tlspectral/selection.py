"""Heads, layers, receivers and parts as people write them: one reader for every function and command.

No model is asked here: `heads_by_layer` says which of the heads a model has.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import pandas as pd

from tlspectral.errors import BadHead, did_you_mean

Head = Any
"""One head: `"L5H1"`, `"5.1"`, `(5, 1)`, or a row with `layer` and `head`; negative layers count from the end."""

Heads = Iterable[Any] | pd.DataFrame | str
"""Heads: one `Head`, `"L5"` for all of a layer, a list of these, or a DataFrame with `layer` and `head`."""

HEAD_FORMS = (
    'a head is "L5H1", "5.1", (5, 1) or a table row with layer and head; heads are one of these, "L5" for all of a '
    "layer, a list of them, or a DataFrame with layer and head as columns or index"
)
_FIELDS = ("layer", "head")
_NAME = re.compile(r"L?(-?\d+)[H.](\d+)", re.IGNORECASE)
_LAYER = re.compile(r"L(-?\d+)", re.IGNORECASE)
_RECEIVER = re.compile(r"L?(-?\d+)(H|\.|KV)(\d+)\.([qkv])", re.IGNORECASE)
_MLP = re.compile(r"L?(-?\d+)\.?MLP", re.IGNORECASE)


def head_name(layer: int, head: int) -> str:
    """Return the name of a head as tables print it: L12H0."""
    return f"L{layer}H{head}"


def head_pair(head: Head, n_layers: int | None = None) -> tuple[int, int]:
    """Return layer and head of one head.

    Args:
        head: see `Head`.
        n_layers: layers of the model, from which a negative layer is counted; None leaves it negative.

    Raises:
        BadHead: `head` names no head.
    """
    if isinstance(head, str):
        match = _NAME.fullmatch(head.strip())
        pair: tuple[Any, ...] = () if match is None else (int(match[1]), int(match[2]))
    elif isinstance(head, pd.Series) and set(_FIELDS) <= set(head.index):
        pair = (head["layer"], head["head"])
    elif isinstance(head, pd.Series) and isinstance(head.name, tuple):  # of a DataFrame whose index is layer, head
        pair = head.name
    elif set(_FIELDS) <= set(getattr(head, "_fields", ())):
        pair = (head.layer, head.head)
    elif isinstance(head, Iterable) and not isinstance(head, bytes | Mapping | Set):
        # A tensor without dimensions is iterable by its type alone.
        pair = () if getattr(head, "ndim", 1) == 0 else tuple(head)
    else:
        pair = ()
    numbers = [whole_number(part) for part in pair]
    if len(numbers) != 2:
        _refuse(head)
    layer, index = numbers
    if layer is None or index is None:
        _refuse(head)
    if n_layers is not None and -n_layers <= layer < 0:
        layer += n_layers
    return layer, index


def head_pairs(heads: Any, n_layers: int | None = None) -> list[tuple[int, int]]:
    """Return layer and head of each head, in their order, each once.

    Args:
        heads: see `Heads`.
        n_layers: as for `head_pair`.

    Raises:
        BadHead: heads in none of the forms.
    """
    if isinstance(heads, pd.DataFrame) and set(heads.index.names) >= set(_FIELDS):
        heads = heads.reset_index() if not set(_FIELDS) & set(heads.columns) else heads.reset_index(drop=True)
    if isinstance(heads, pd.MultiIndex) and set(heads.names) >= set(_FIELDS):
        heads = heads.to_frame(index=False)
    if isinstance(heads, pd.DataFrame):
        if not set(_FIELDS) <= set(heads.columns):
            names = ", ".join(map(str, heads.columns))
            raise BadHead(f"a DataFrame with columns {names} names no heads: {HEAD_FORMS}")
        heads = zip(heads["layer"], heads["head"], strict=True)
    elif _is_one(heads):
        heads = [heads]
    if not isinstance(heads, Iterable) or isinstance(heads, Mapping):
        _refuse(heads)
    return list(dict.fromkeys(head_pair(head, n_layers) for head in heads))


def whole_layers(heads: Any) -> tuple[list[int], Any]:
    """Return the layers that are named as a whole, such as `"L5"`, and the other heads of a choice."""
    listed = [heads] if isinstance(heads, str) else heads
    if not isinstance(listed, list | tuple):
        return [], heads
    named = [(_LAYER.fullmatch(one.strip()) if isinstance(one, str) else None, one) for one in listed]
    layers = [int(match[1]) for match, _ in named if match is not None]
    return layers, [one for match, one in named if match is None] if layers else heads


def _is_one(heads: Any) -> bool:
    """Tell a single head from a list of them: a name, a row, or two whole numbers."""
    if isinstance(heads, str | pd.Series) or set(_FIELDS) <= set(getattr(heads, "_fields", ())):
        return True
    if isinstance(heads, list | tuple) or getattr(heads, "ndim", 0) == 1:
        return len(heads) == 2 and all(whole_number(part) is not None for part in heads)
    return False


class Receiver(NamedTuple):
    """What an edge ends in: the queries of a head, keys or values, which several heads may share, an MLP or the logits.

    `input` is q, k, v, mlp or logits. `head` counts key/value heads where `shared`, else query heads; it is -1 for an
    MLP and for the logits. `layer` of the logits is the number of layers; -1 where no model has been asked.
    """

    layer: int
    head: int
    input: Any
    shared: bool = False

    @property
    def name(self) -> str:
        """Name in tables: L18H6.q, L18KV2.k where heads share it, L3MLP, or logits."""
        if self.input in ("mlp", "logits"):
            return f"L{self.layer}MLP" if self.input == "mlp" else "logits"
        return f"L{self.layer}{'KV' if self.shared else 'H'}{self.head}.{self.input}"


Receivers = str | Receiver | Iterable[Any] | Mapping[str, Any] | pd.DataFrame
"""Receivers: `"L18H6.q"`, `"L18KV2.k"`, `"L3MLP"`, `"logits"`, a list of these, a table with a column `receiver`, or
`{"k": heads}` with `Heads` in any form, for the keys of these heads; also `"q"` and `"v"`."""


def receivers(heads: Heads, input: Literal["q", "k", "v"]) -> list[str]:
    """Return the queries, keys or values of heads as receivers, for `ablate(into=)` and `edge_effects`.

    >>> import tlspectral as tls
    >>> tls.hooks.receivers(["L1H0", (1, 2)], "k")
    ['L1H0.k', 'L1H2.k']

    Args:
        heads: as in `ablate`: "L5H1", (5, 1), a table row, a list of these, or a DataFrame with `layer` and `head`; not
            "L5", as no model is given that says how many heads the layer has.
        input: `"q"` (queries), `"k"` (keys) or `"v"` (values).

    Returns:
        A name for each head, in their order: `"L1H0.k"`. Heads that share keys or values keep their own names here;
        where a model is given, such a name is an alias of the group's receiver, `"L1KV0.k"`.

    Raises:
        BadHead: heads in none of the forms, or all heads of a layer.
        ValueError: another input.
    """
    if input not in ("q", "k", "v"):
        raise ValueError(f"input must be 'q', 'k' or 'v' (queries, keys or values), not {input!r}")
    return [f"{head_name(*pair)}.{input}" for pair in head_pairs(heads)]


def read_receivers(given: Receivers) -> list[Receiver]:
    """Return receivers in their order, each once. Raises BadHead for what names none."""
    if isinstance(given, pd.DataFrame):
        if "receiver" not in given.columns:
            raise BadHead(f"a DataFrame without a column receiver names no receivers: {RECEIVER_FORMS}")
        given = given["receiver"]
    listed = [given] if isinstance(given, str | Receiver) else given
    if not isinstance(listed, Iterable) or isinstance(listed, Mapping):
        raise BadHead(f"{repr(given)[:200]} names no receivers: {RECEIVER_FORMS}{naming_nodes(given)}")
    return list(dict.fromkeys(map(_receiver, listed)))


def head_receiver(given: Head | Receiver) -> Receiver:
    """Return the queries, keys or values of one head, of a head alone its keys.

    Raises BadHead for what names none, and for keys or values of a group.
    """
    if not isinstance(given, Receiver) and not (isinstance(given, str) and given.strip()[-1:] in tuple("qkvQKV")):
        return Receiver(*head_pair(given), "k")
    [end] = read_receivers(given)
    if end.shared:
        raise BadHead(
            f"{end.name} may be read by several heads, each with an operator of its own: name one of them, such as "
            f"L{end.layer}H0.{end.input}"
        )
    return end


RECEIVER_FORMS = (
    'a receiver is "L18H6.q", "L18H6.k" or "L18KV2.k" (also .v), "L3MLP" or "logits"; the keys of heads are '
    '{"k": heads}'
)


def _receiver(given: Any) -> Receiver:
    if isinstance(given, Receiver):
        return given
    if isinstance(given, str) and given.strip().lower() == "logits":
        return Receiver(-1, -1, "logits")
    if isinstance(given, str) and (mlp := _MLP.fullmatch(given.strip())) is not None:
        return Receiver(int(mlp[1]), -1, "mlp")
    match = _RECEIVER.fullmatch(given.strip()) if isinstance(given, str) else None
    if match is None or (match[2].upper() == "KV" and match[4].lower() == "q"):
        raise BadHead(f"{repr(given)[:200]} names no receiver: {RECEIVER_FORMS}{naming_nodes(given)}")
    input: Any = match[4].lower()
    return Receiver(int(match[1]), int(match[3]), input, match[2].upper() == "KV")


def whole_number(value: Any) -> int | None:
    """Return an integer of any library, or of a float that holds one (columns with NaN); None for anything else."""
    if isinstance(value, bool | np.bool_) or str(getattr(value, "dtype", "")) == "torch.bool":
        return None
    if isinstance(value, float | np.floating):
        return int(value) if float(value).is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def counted(value: Any, least: int, what: str) -> int:
    """Return a number of things as an integer. Raises ValueError, with `what` it is, for none or too few."""
    if (number := whole_number(value)) is None or number < least:
        raise ValueError(f"{what}, a whole number from {least} up; found {value!r}")
    return number


Symbol = Literal["M_S", "M_A", "Im(M_t)"]
"""What is removed, by the symbol that "Fingerprint, Not Blueprint" has for it."""

_PARTS: dict[str, str] = {"M_S": "symmetric", "M_A": "antisymmetric", "Im(M_t)": "rope_phase"}


def chosen_part(part: str, known: Iterable[str]) -> Any:
    """Return the name of a part that is given by name or by `Symbol`.

    Raises:
        ValueError: it is none of the known ones; the message has the nearest of them.
    """
    known = list(known)
    name = _PARTS.get(part, part) if isinstance(part, str) else part
    if name in known:
        return name
    symbols = [symbol for symbol, meant in _PARTS.items() if meant in known]
    hint = did_you_mean(str(part), [*known, *symbols])
    raise ValueError(f"part must be one of {', '.join(map(repr, [*known, *symbols]))}; not {part!r}{hint}")


_NODES = {
    "embed": "embedding", "attn_head_out": "L{layer}H{head}", "mlp_out": "L{layer}MLP", "mlp_in": "L{layer}MLP",
    "q_input": "L{layer}H{head}.q", "k_input": "L{layer}H{head}.k", "v_input": "L{layer}H{head}.v", "logits": "logits",
}  # fmt: skip


def naming_nodes(given: Any) -> str:
    """Return the end of a message with the names of TransformerLens' node, or edge of nodes; empty for anything else.

    It is the largest or the first of several edges or nodes, such as an AttributionResult holds.
    """
    if hasattr(given, "node_scores") and (scores := given.edge_scores or given.node_scores) is not None:
        largest = naming_nodes(max(scores, key=lambda one: abs(scores[one]))) if scores else ""
        held = "edges" if given.edge_scores else "nodes alone"
        return f"; an {type(given).__name__} of TransformerLens has {held}{largest.replace(';', ',', 1)}"
    ends = [*given][:2] if isinstance(given, list | tuple | dict) else [given]
    if ends and isinstance(ends[0], list | tuple):
        return naming_nodes(ends[0])
    known = (one for one in ends if hasattr(one, "position") and getattr(one, "kind", None) in _NODES)
    names = [_NODES[one.kind].format(layer=one.layer, head=one.head) for one in known]
    shown = repr(tuple(names)) if len(names) > 1 else "".join(map(repr, names))
    return f"; of TransformerLens' nodes, which are at one position each, give the names: {shown}" if names else ""


def _refuse(given: Any) -> NoReturn:
    if isinstance(given, str) and _LAYER.fullmatch(given.strip()):
        raise BadHead(f"{given!r} is a whole layer, and here heads are named one by one, such as {given.strip()}H0")
    raise BadHead(f"{repr(given)[:200]} names no head: {HEAD_FORMS}{naming_nodes(given)}")
