"""Heads, layers, receivers and parts as people write them: one reader for every function and command.

No model is asked here: `heads_by_layer` and `one_head` say which of the heads a model has.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import pandas as pd

from tlspectral.containers import are_columns, column_names, columns_of, is_array, named_fields, plain, values
from tlspectral.errors import BadHead, did_you_mean

Head = Any
"""One head: `"L5H1"`, `"5.1"`, `(5, 1)`, or a row with `layer` and `head`; negative numbers count from the end."""

Heads = Any
"""Heads: one `Head`, `"L5"` for all of a layer, a list, column or two-axis array of these, or a frame of any library
with columns `layer` and `head`. Only a tuple or list of two numbers is one head; an array of them is refused."""

HEAD_FORMS = (
    'a head is "L5H1", "5.1", (5, 1) or a table row with layer and head; heads are one of these, "L5" for all of a '
    "layer, a list of them, or a DataFrame with layer and head as columns or index"
)
_FIELDS = ("layer", "head")
_NAME = re.compile(r"L?(-?\d+)[H.](-?\d+)", re.IGNORECASE)
_LAYER = re.compile(r"L(-?\d+)", re.IGNORECASE)
_RECEIVER = re.compile(r"L?(-?\d+)(H|\.|KV)(-?\d+)\.([qkv])", re.IGNORECASE)
_MLP = re.compile(r"L?(-?\d+)\.?MLP", re.IGNORECASE)


def head_name(layer: int, head: int) -> str:
    """Return the name of a head as tables print it: L12H0."""
    return f"L{layer}H{head}"


def head_pair(head: Head) -> tuple[int, int]:
    """Return layer and head of one head; negative numbers stay negative, as no model is asked.

    Raises BadHead for what names no head, and for a value with two readings.
    """
    layer, index = _one_head(head)
    if index is None:
        _refuse(plain(head))
    return layer, index


def head_pairs(heads: Heads) -> list[tuple[int, int]]:
    """Return layer and head of each head, in their order, each once; negative numbers stay negative.

    Raises BadHead as `named_heads`, and for all heads of a layer, since no model says how many it has.
    """
    found = []
    for layer, head in named_heads(heads):
        if head is None:
            _refuse(f"L{layer}")
        found.append((layer, head))
    return found


def named_heads(heads: Heads) -> list[tuple[int, int | None]]:
    """Return layer and head of each head, in their order, each once; head None for all heads of a layer.

    Every function that takes heads reads them here. Negative numbers stay negative. A frame is read by its columns
    `layer` and `head`, never by iterating over it.

    Raises BadHead for heads in none of the forms of `Heads`, and for a value with two readings, both of which it names.
    """
    return list(dict.fromkeys(_read(heads)))


def pair_in_table(head: Head, table: pd.DataFrame, of: str) -> tuple[int, int]:
    """Return layer and head of one head, from 0 on; negative numbers count from the end of a table's layers and heads.

    `of` names the table in messages. Whether the table has the head is not asked. Raises BadHead as `head_pair`, and
    for a count from the end of layers or heads of which the table lacks some.
    """
    layer, index = head_pair(head)
    if min(layer, index) < 0:
        layer = _of_table(layer, table["layer"], head, of)
        index = _of_table(index, table.loc[table["layer"] == layer, "head"], head, of)
    return layer, index


def from_end(index: int, n: int) -> int | None:
    """Return an index from 0 on, of n things; a negative one counts from the end. None if there is no such thing."""
    return index % n if -n <= index < n else None


def which_exist(index: int, n: int) -> str:
    """Return the range of the indices of n things, for a message; from the end too, if such an index was given."""
    return f"0 to {n - 1}" + (f", or -{n} to -1 from the end" if index < 0 else "")


def _read(heads: Any) -> list[tuple[int, int | None]]:
    given = _of_index(heads) if isinstance(heads, pd.DataFrame | pd.Series | pd.MultiIndex) else plain(heads)
    of_columns = isinstance(given, Mapping) and all(values(given.get(name)) is not None for name in _FIELDS)
    if of_columns or column_names(given) is not None:
        return _of_columns(given)
    if _is_one(given):
        return [_one_head(given)]
    if are_columns(given):
        _refuse_columns(given)
    listed = values(given)
    if listed is None:
        _refuse(given)
    if not isinstance(given, list | tuple):
        _refuse_array(given, listed)
    return [_one_head(one) for one in listed]


def _is_one(given: Any) -> bool:
    """Return whether a value is a single head or layer: a name, a row, or a tuple or list of two whole numbers."""
    return isinstance(given, str) or _row(given) is not None or _two_numbers(given) is not None


def _one_head(given: Any) -> tuple[int, int | None]:
    head = plain(given)
    if isinstance(head, str):
        if (match := _NAME.fullmatch(head.strip())) is not None:
            return int(match[1]), int(match[2])
        if (match := _LAYER.fullmatch(head.strip())) is not None:
            return int(match[1]), None
        _refuse(head)
    pair = _row(head) or _two_numbers(head)
    if pair is not None:
        return pair
    if is_array(head) and (listed := values(head)) is not None:
        _refuse_array(head, listed)
    _refuse(head)


def _two_numbers(given: Any) -> tuple[int, int] | None:
    """Return the numbers of a plain tuple or list of two. A tuple with names for its entries is a row, or no head."""
    if not (isinstance(given, list) or type(given) is tuple) or len(given) != 2:
        return None
    layer, head = map(whole_number, given)
    return None if layer is None or head is None else (layer, head)


def _row(given: Any) -> tuple[int, int] | None:
    """Return layer and head of a table row: by these names, or of a Series whose name is both, as its index had them.

    Raises BadHead for a row that a table of this package has for something else than a head.
    """
    fields = named_fields(given)
    if fields is None:
        return None
    if set(_FIELDS) <= set(fields):
        layer, head = (whole_number(fields[name]) for name in _FIELDS)
        if layer is None or head is None:
            return None
        if isinstance(given, Receiver) and (given.shared or given.input not in ("q", "k", "v")):
            raise BadHead(f"{given.name} is not one head: an MLP, the logits, or keys and values that heads share")
        if not isinstance(given, Receiver):
            _require_head_row(layer, head)
        return layer, head
    return _two_numbers(given.name) if isinstance(given, pd.Series) else None


def _require_head_row(layer: int, head: int) -> None:
    """Refuse head -1 in a table row, which tables of this package have for an MLP, the embedding or a set of heads."""
    if head < 0:
        raise BadHead(
            f"a table row with layer {layer} and head {head} has two readings: tables write -1 for what is not a head "
            "(an MLP, the embedding, a set of heads), or it is a head counted from the end. Leave the row out for the "
            f"first, write ({layer}, {head}) for the second"
        )


def _of_index(given: pd.DataFrame | pd.Series | pd.MultiIndex) -> Any:
    """Return heads of pandas with layer and head as columns where they are levels of an index."""
    index = given if isinstance(given, pd.MultiIndex) else given.index
    if not set(_FIELDS) <= set(index.names):
        return given
    if isinstance(given, pd.DataFrame):
        return given.reset_index(drop=bool(set(_FIELDS) & set(given.columns)))
    pairs = index.to_frame(index=False)[[*_FIELDS]]
    if isinstance(given, pd.Series) and len(given):
        listed = values(given) or []
        if all(isinstance(one, str) and _NAME.fullmatch(one.strip()) for one in listed):
            named, indexed = head_pairs(listed), head_pairs(pairs)
            if named != indexed:
                raise BadHead(
                    f"a Series has two readings: the heads of its values, {head_name(*named[0])} first, or those of "
                    f"its index, {head_name(*indexed[0])} first. Write series.tolist() for the values, series.index "
                    "for the index"
                )
    return pairs


def _of_columns(given: Any) -> list[tuple[int, int | None]]:
    """Return the heads of a frame of any library, or of a dictionary of columns, by its columns layer and head."""
    names = list(map(str, given)) if isinstance(given, Mapping) else column_names(given) or []
    if not set(_FIELDS) <= set(names):
        raise BadHead(f"a {type(given).__name__} with columns {', '.join(names)} names no heads: {HEAD_FORMS}")
    try:
        rows = list(zip(*columns_of(given, _FIELDS), strict=True))
    except TypeError as error:
        raise BadHead(str(error)) from error
    except ValueError as error:
        raise BadHead(f"the columns layer and head have unequal lengths: {HEAD_FORMS}") from error
    found: list[tuple[int, int | None]] = []
    for row in rows:
        pair = _two_numbers(row)
        if pair is None:
            _refuse(row)
        _require_head_row(*pair)
        found.append(pair)
    return found


def _of_table(index: int, column: pd.Series, head: Any, of: str) -> int:
    if index >= 0:
        return index
    known = {*map(int, column)}
    found = from_end(index, len(known))
    if found is None or known != {*range(len(known))}:
        raise BadHead(
            f"{head!r} counts from the end, and {of} does not hold all of these: count from 0 on, as its rows do"
        )
    return found


def _refuse_columns(given: Any) -> NoReturn:
    """Refuse layers beside heads. Raises BadHead with both readings."""
    columns = [values(one) or [] for one in given]
    first = second = ""
    if len(columns) == 2 and all(whole_number(one) is not None for column in columns for one in column):
        pairs = [_two_numbers(list(pair)) for pair in zip(*columns, strict=False)]
        first = f" ({', '.join(head_name(*pair) for pair in pairs[:3] if pair)}{', ...' * (len(pairs) > 3)})"
        rows = [_two_numbers(row) for row in columns]
        second = f" ({', '.join(head_name(*row) for row in rows if row)})" if all(rows) else ""
    kind = "lists" if isinstance(given[0], list) else "arrays"
    raise BadHead(
        f"a {type(given).__name__} of {len(given)} {kind} has two readings: layers beside their heads{first}, as "
        f"np.where, np.unravel_index and torch.where return them, or a row of layer and head for each head{second}. "
        "Write list(zip(layers, heads)) or np.argwhere(...) for the first, a list of tuples for the second; found "
        + _shown(given)
    )


def _refuse_array(given: Any, listed: list[Any]) -> None:
    """Refuse an array, a column or a generator of numbers alone, which does not say what they are. Raises BadHead."""
    shown = _shown(given)
    flat = [one for row in listed for one in (row if isinstance(row, list) else [row])]
    if any(isinstance(one, bool) for one in flat):
        raise BadHead(f"{shown} is a mask and names no heads: write np.argwhere(mask), of [layers, heads]")
    numbers = [whole_number(one) for one in listed]
    if numbers and None not in numbers:
        layer, head = f"{numbers[0]}", f"{numbers[-1]}"
        heads = ", ".join(f"(layer, {number})" for number in numbers[:3]) + ", ..." * (len(numbers) > 3)
        one = f"one head, L{layer}H{head}" if len(numbers) == 2 else "places in a flattened table of heads"
        write = (
            f'"L{layer}H{head}" or ({layer}, {head})'
            if len(numbers) == 2
            else "list(zip(*np.unravel_index(places, (n_layers, n_heads))))"
        )
        raise BadHead(
            f"{shown} has two readings: {one}, or {len(numbers)} heads of one layer. Write {write} for the first, "
            f"[{heads}] for the second"
        )
    if listed and isinstance(listed[0], list) and getattr(given, "ndim", 0) >= 2 and len(listed[0]) != 2:
        raise BadHead(
            f"an array of heads has a row of layer and head for each, [heads, 2]; found shape {tuple(given.shape)}: "
            "np.argwhere(...) returns such rows"
        )


def _shown(given: Any) -> str:
    return " ".join(repr(given).split())[:200]


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


Receivers = Any
"""Receivers: `"L18H6.q"`, `"L18KV2.k"`, `"L3MLP"`, `"logits"`, a list of these, a frame with a column `receiver`, or
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
    """Return receivers in their order, each once; of a frame its column `receiver`. Raises BadHead for none."""
    given = plain(given)
    if column_names(given) is not None:
        given = named_column(given, "receiver", RECEIVER_FORMS)
    listed = [given] if isinstance(given, str | Receiver) else values(given)
    if listed is None:
        raise BadHead(f"{_shown(given)} names no receivers: {RECEIVER_FORMS}{naming_nodes(given)}")
    return list(dict.fromkeys(map(_receiver, listed)))


def named_column(frame: Any, name: str, forms: str) -> list[Any]:
    """Return one column of a frame of any library. Raises BadHead, with the forms that do, for a frame without it."""
    if name not in (column_names(frame) or []):
        raise BadHead(f"a {type(frame).__name__} without a column {name} names no {name}s: {forms}")
    try:
        return columns_of(frame, [name])[0]
    except TypeError as error:
        raise BadHead(str(error)) from error


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
    if getattr(value, "ndim", 0):  # a tensor with one element would pass for a number
        return None
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
    """Raise BadHead for what names no head."""
    if isinstance(given, str) and _LAYER.fullmatch(given.strip()):
        raise BadHead(f"{given!r} is a whole layer, and here heads are named one by one, such as {given.strip()}H0")
    raise BadHead(f"{_shown(given)} names no head: {HEAD_FORMS}{naming_nodes(given)}")
