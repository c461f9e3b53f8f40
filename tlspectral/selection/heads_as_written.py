"""Read heads and layers in every form in which users write them.

Every function and command reads them here. Whether a model has a head is checked elsewhere, by `heads_by_layer` and
`one_head`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import pandas as pd

from tlspectral.containers import are_columns, column_names, columns_of, is_array, named_fields, plain, values
from tlspectral.errors import WHOLE_NUMBERS, BadHead, kind_of, not_a, shown
from tlspectral.errors.settings import whole_number
from tlspectral.selection.node_names import NamedHeads, Receiver, head_name, naming_nodes

Head = Any
"""One head: `"L5H1"`, `"5.1"`, `(5, 1)`, or a row with `layer` and `head`; negative numbers count from the end."""

Heads = Any
"""Heads: one `Head`, `"L5"` for all heads of a layer, `"L5KV1"` for the query heads of a key/value group, a list,
column or two-axis array of these, or a frame of any library with columns `layer` and `head`. A tuple or list of two
numbers is one head; a one-axis array is refused."""

HEAD_FORMS = (
    'a head is "L5H1", "5.1", (5, 1) or a table row with layer and head; heads are one of these, "L5" for all of a '
    'layer, "L5KV1" for a key/value group, a list of heads, or a DataFrame with layer and head as columns or index'
)

HEADS_PER_GROUP = "heads_per_group"
"""Key in the `attrs` of tables: query heads per key/value group, a number, or a dict by layer if layers differ."""

_FIELDS = ("layer", "head")

_NAME = re.compile(r"L?(-?\d+)[H.](-?\d+)", re.IGNORECASE)

_LAYER = re.compile(r"L(-?\d+)", re.IGNORECASE)

_GROUP = re.compile(r"L?(-?\d+)KV(-?\d+)", re.IGNORECASE)


def recorded_groups(sizes: Mapping[int, int | None]) -> dict[str, Any]:
    """Return the entry of a table's `attrs` that says how many query heads a key/value group has, as a dict.

    `sizes`: heads per group by layer; None if unknown, and nothing is recorded. Nothing is recorded without layers.
    """
    known = {*sizes.values()}
    if not known or None in known:
        return {}
    return {HEADS_PER_GROUP: known.pop() if len(known) == 1 else {str(layer): n for layer, n in sizes.items()}}


def named_head(head: Head) -> NamedHeads:
    """Return one head, or a key/value group, which is one head in a model without shared keys; never a whole layer.

    `head`: "L5H1", "5.1", (5, 1), "L5KV1", or a row with layer and head. Raises BadHead for anything else, and for a
    value with two readings.
    """
    named = _one_head(head)
    if named.head is None and named.group is None:
        refuse_head(plain(head))
    return named


def head_pair(head: Head) -> tuple[int, int]:
    """Return (layer, head) of one head. Negative numbers stay negative, because the model is not known here.

    `head`: "L5H1", "5.1", (5, 1), or a row with layer and head. Raises BadHead for anything else, for "L5KV1" (a
    key/value group), and for a value with two readings.
    """
    return _pair(named_head(head))


def head_pairs(heads: Heads) -> list[tuple[int, int]]:
    """Return (layer, head) of each head in the given order, without duplicates. Negative numbers stay negative.

    `heads`: one head ("L5H1", (5, 1), a table row), a list of heads, or a DataFrame with layer and head. Raises BadHead
    for anything else, and for "L5" (all heads of a layer) and "L5KV1" (those of a key/value group), because the number
    of heads is not known here.
    """
    return [_pair(named) for named in named_heads(heads)]


def named_heads(heads: Heads) -> list[NamedHeads]:
    """Return what each name stands for (a head, a group or a layer), in the given order, without duplicates.

    Every function that takes heads reads them here. Negative numbers stay negative. `heads`: "L5H1", (5, 1), "L5",
    "L5KV1", a list of these, or a frame with columns `layer` and `head`. Raises BadHead for anything else, and for a
    value with two readings, which the message names.
    """
    return list(dict.fromkeys(_read(heads)))


def group_heads(named: NamedHeads, n_heads: int, size: int) -> list[int]:
    """Return the query heads of a key/value group. `named`: the group, its layer counted from 0.

    `n_heads`: query heads of the layer; `size`: query heads per group. Raises BadHead if the group does not exist; the
    message says which groups do.
    """
    assert named.group is not None
    group = from_end(named.group, n_heads // size)
    if group is None:
        each = "one head each" if size == 1 else f"{size} query heads each"
        raise BadHead(
            f"{named.name} does not exist: layer {named.layer} has key/value groups "
            f"{which_exist(named.group, n_heads // size)}, with {each}"
        )
    return list(range(group * size, (group + 1) * size))


def only_pair(pairs: list[tuple[int, int]], name: str) -> tuple[int, int]:
    """Return the only entry of `pairs`, (layer, head).

    Raises BadHead if there are more: `name`, a key/value group, is then not one head.
    """
    if len(pairs) > 1:
        listed = ", ".join(head_name(*pair) for pair in pairs[:8]) + ", ..." * (len(pairs) > 8)
        raise BadHead(
            f"{name} is a key/value group of {len(pairs)} heads, and here one head is needed: name one of {listed}"
        )
    return pairs[0]


def pair_in_table(head: Head, table: pd.DataFrame, of: str) -> tuple[int, int]:
    """Return (layer, head) of one head, counted from 0; a negative number counts from the end.

    `table`: a DataFrame with columns `layer` and `head`, whose numbers tell the end; it need not contain the head.
    `of`: the table's name in messages. Raises BadHead if `head` is not one head, and for a negative number if the table
    lacks some layers or heads.
    """
    named = named_head(head)
    return only_pair(_pairs_of(named, table, head, of), named.name)


def pairs_in_table(heads: Heads, table: pd.DataFrame, of: str) -> list[tuple[int, int]]:
    """Return (layer, head) of each head, counted from 0, in the given order; "L5" stands for the layer's rows.

    `table`: a DataFrame with columns `layer` and `head`; its attrs say how many heads the group "L5KV1" has. It need
    not contain the heads. `of`: the table's name in messages. Raises BadHead for a value that is not heads, a layer
    that the table lacks, a group if the attrs do not say its size, and a negative number if the table lacks some layers
    or heads.
    """
    pairs = (pair for named in named_heads(heads) for pair in _pairs_of(named, table, named.name, of))
    return list(dict.fromkeys(pairs))


def _pairs_of(named: NamedHeads, table: pd.DataFrame, given: Any, of: str) -> list[tuple[int, int]]:
    """Return the (layer, head) that one name stands for, from the rows and attrs of `table`.

    `given`: the name as the user wrote it, `of`: the table's name, both for messages. Raises BadHead as
    `pairs_in_table`.
    """
    layer = _of_table(named.layer, table["layer"], given, of)
    in_layer = table.loc[table["layer"] == layer, "head"]
    if named.head is not None:
        return [(layer, _of_table(named.head, in_layer, given, of))]
    if named.group is None:
        heads = sorted({*map(int, in_layer)})
        if not heads:
            raise BadHead(f"{named.name} is not in {of}: name heads that it has")
        return [(layer, head) for head in heads]
    sizes = table.attrs.get(HEADS_PER_GROUP)
    size = whole_number(sizes.get(str(layer)) if isinstance(sizes, Mapping) else sizes)
    if size is None:
        raise BadHead(
            f"{named.name} is a key/value group, and the attrs of {of} do not say which heads it has "
            f"({HEADS_PER_GROUP}): name its heads, such as L{layer}H0"
        )
    if named.group < 0:
        named = named._replace(group=_of_table(named.group, in_layer // size, given, of))
    group = named.group
    assert group is not None
    return [(layer, head) for head in range(group * size, (group + 1) * size)]


def _pair(named: NamedHeads) -> tuple[int, int]:
    """Return (layer, head) of one head. Raises BadHead for a group or a layer, whose heads are not known here."""
    if named.head is None:
        refuse_head(named.name)
    return named.layer, named.head


def from_end(index: int, n: int) -> int | None:
    """Return `index` counted from 0 for n things; a negative index counts from the end. None if it is out of range."""
    return index % n if -n <= index < n else None


def which_exist(index: int, n: int) -> str:
    """Return text for a message: the valid indices of n things, "0 to 11"; for a negative `index` "0 to 11, or -12 to
    -1 from the end".
    """
    return f"0 to {n - 1}" + (f", or -{n} to -1 from the end" if index < 0 else "")


def _read(heads: Any) -> list[NamedHeads]:
    """Return what each name stands for (a head, a group or a layer), in the given order, with duplicates.

    `heads`: one head, a list of heads, or a frame, in the forms of `named_heads`. Raises BadHead for anything else, and
    for a value with two readings.
    """
    given = _of_index(heads) if isinstance(heads, pd.DataFrame | pd.Series | pd.MultiIndex) else plain(heads)
    of_columns = isinstance(given, Mapping) and all(values(given.get(name)) is not None for name in _FIELDS)
    if of_columns or column_names(given) is not None:
        return _of_columns(given)
    if isinstance(given, str) or _row(given) is not None or _two_numbers(given) is not None:
        return [_one_head(given)]
    if are_columns(given):
        _refuse_columns(given)
    listed = values(given)
    if listed is None:
        refuse_head(given)
    if not isinstance(given, list | tuple):
        _refuse_array(given, listed)
    if isinstance(given, list | tuple) and kind_of(given) == WHOLE_NUMBERS:
        refuse_head(given)
    return [_one_head(head) for head in listed]


def _one_head(given: Any) -> NamedHeads:
    """Return what one name stands for: a head ("L5H1", (5, 1) or a table row), a group ("L5KV1") or a layer ("L5").
    Raises BadHead for anything else.
    """
    head = plain(given)
    if isinstance(head, str):
        name = head.strip()
        if (match := _NAME.fullmatch(name)) is not None:
            return NamedHeads(int(match[1]), int(match[2]))
        if (match := _LAYER.fullmatch(name)) is not None:
            return NamedHeads(int(match[1]))
        if (match := _GROUP.fullmatch(name)) is not None:
            return NamedHeads(int(match[1]), group=int(match[2]))
        refuse_head(head)
    if (row := _row(head)) is not None:
        return row
    if (pair := _two_numbers(head)) is not None:
        return NamedHeads(*pair)
    if is_array(head) and (listed := values(head)) is not None:
        _refuse_array(head, listed)
    refuse_head(head)


def _two_numbers(given: Any) -> tuple[int, int] | None:
    """Return the two whole numbers of a plain tuple or list of length two; otherwise None, also for a named tuple."""
    if not (isinstance(given, list) or type(given) is tuple) or len(given) != 2:
        return None
    layer, head = map(whole_number, given)
    return None if layer is None or head is None else (layer, head)


def _row(given: Any) -> NamedHeads | None:
    """Return the head of a table row by its fields `layer` and `head`, or by the name (5, 1) of a Series; the key/value
    group of a row that a sweep over groups has for it. None for any other value.

    Raises BadHead for a row that is not a head in tables of this package, such as the row of an MLP.
    """
    fields = named_fields(given)
    if fields is None:
        return None
    if set(_FIELDS) <= set(fields):
        layer, head = (whole_number(fields[name]) for name in _FIELDS)
        if layer is None or head is None:
            return None
        if isinstance(given, Receiver):
            if given.shared or given.input not in ("q", "k", "v"):
                raise BadHead(
                    f"{given.name} is not one head (it is an MLP, the logits, or keys or values that heads share): "
                    f"give a head such as L{max(given.layer, 0)}H0"
                )
            return NamedHeads(layer, head)
        return _of_row(layer, head, fields.get("name"))
    pair = _two_numbers(given.name) if isinstance(given, pd.Series) else None
    return None if pair is None else NamedHeads(*pair)


def _of_row(layer: int, head: int, name: Any) -> NamedHeads:
    """Return the head of a table row, or the key/value group in a row with head -1 whose `name` is "L5KV1".

    Raises BadHead for another row with head -1: tables write this for an MLP or another non-head.
    """
    if head >= 0:
        return NamedHeads(layer, head)
    if isinstance(name, str) and _GROUP.fullmatch(name.strip()):
        return _one_head(name)
    raise BadHead(
        f"a table row with layer {layer} and head {head} has two readings: tables write -1 for what is not a head "
        "(an MLP, the embedding, a set of heads), and -1 also counts a head from the end. For the first leave the "
        f"row out, for the second write ({layer}, {head})"
    )


def _of_index(given: pd.DataFrame | pd.Series | pd.MultiIndex) -> Any:
    """Return a new DataFrame with `layer` and `head` as columns, if these are levels of the index of `given`; otherwise
    `given` itself.

    Raises BadHead for a Series whose values name other heads than its index.
    """
    index = given if isinstance(given, pd.MultiIndex) else given.index
    if not set(_FIELDS) <= set(index.names):
        return given
    if isinstance(given, pd.DataFrame):
        return given.reset_index(drop=bool(set(_FIELDS) & set(given.columns)))
    pairs = index.to_frame(index=False)[[*_FIELDS]]
    if isinstance(given, pd.Series) and len(given):
        listed = values(given) or []
        if all(isinstance(name, str) and _NAME.fullmatch(name.strip()) for name in listed):
            named, indexed = head_pairs(listed), head_pairs(pairs)
            if named != indexed:
                raise BadHead(
                    f"a Series has two readings: the heads in its values, {head_name(*named[0])} first, or the heads "
                    f"in its index, {head_name(*indexed[0])} first. Write series.tolist() for the values, series.index "
                    "for the index"
                )
    return pairs


def _of_columns(given: Any) -> list[NamedHeads]:
    """Return the head of each row, from the columns `layer` and `head` of a frame of any library or a dict of columns;
    in a row with head -1 the key/value group in the column `name`.

    Raises BadHead if a column is missing, or its entries are not heads.
    """
    names = list(map(str, given)) if isinstance(given, Mapping) else column_names(given) or []
    if not set(_FIELDS) <= set(names):
        columns = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
        raise BadHead(f"a {type(given).__name__} with columns {columns[:100]} names no heads: {HEAD_FORMS}")
    try:
        rows = list(zip(*columns_of(given, _FIELDS), strict=True))
    except TypeError as error:
        raise BadHead(str(error)) from error
    except ValueError as error:
        raise BadHead(f"the columns layer and head have unequal lengths: {HEAD_FORMS}") from error
    pairs = []
    for row in rows:
        pair = _two_numbers(row)
        if pair is None:
            refuse_head(row)
        pairs.append(pair)
    of_groups = "name" in names and any(head < 0 for _, head in pairs)
    row_names = columns_of(given, ["name"])[0] if of_groups else [None] * len(pairs)
    return [_of_row(layer, head, name) for (layer, head), name in zip(pairs, row_names, strict=True)]


def _of_table(index: int, column: pd.Series, head: Any, of: str) -> int:
    """Return a layer or head counted from 0; a negative index counts from the end of the values in a table's `column`.

    `head`: the head as the user gave it, and `of`: the table's name, for the message. Raises BadHead if the index is
    negative and the column lacks some numbers.
    """
    if index >= 0:
        return index
    known = {*map(int, column)}
    place = from_end(index, len(known))
    if place is None or known != {*range(len(known))}:
        raise BadHead(
            f"{shown(head)} counts from the end, and {of} does not hold all layers and heads: count from 0, as its "
            "rows do"
        )
    return place


def _refuse_columns(given: Any) -> NoReturn:
    """Raise BadHead for an array of layers and an array of heads, (layers, heads), which has two readings.

    `given`: the tuple or list of arrays. The message shows both readings.
    """
    columns = [values(column) or [] for column in given]
    first = second = ""
    if len(columns) == 2 and all(whole_number(entry) is not None for column in columns for entry in column):
        pairs = [_two_numbers(list(pair)) for pair in zip(*columns, strict=False)]
        first = f" ({', '.join(head_name(*pair) for pair in pairs[:3] if pair)}{', ...' * (len(pairs) > 3)})"
        rows = [_two_numbers(row) for row in columns]
        second = f" ({', '.join(head_name(*row) for row in rows if row)})" if all(rows) else ""
    kind = "lists" if isinstance(given[0], list) else "arrays"
    raise BadHead(
        f"a {type(given).__name__} of {len(given)} {kind} has two readings: layers beside their heads{first}, as "
        f"np.where, np.unravel_index and torch.where return them, or a row of layer and head for each head{second}. "
        "Write list(zip(layers, heads)) or np.argwhere(...) for the first, a list of tuples for the second; found "
        + shown(given)
    )


def _refuse_array(given: Any, listed: list[Any]) -> None:
    """Raise BadHead for an array, column or generator that holds a mask, or numbers with one axis.

    `listed`: its entries. An array [heads, 2] passes.
    """
    text = shown(given)
    flat = [entry for row in listed for entry in (row if isinstance(row, list) else [row])]
    if any(isinstance(entry, bool) for entry in flat):
        raise BadHead(f"{text} is a mask and names no heads: write np.argwhere(mask), for a mask [layers, heads]")
    numbers = [whole_number(entry) for entry in listed]
    if numbers and None not in numbers:
        layer, head = f"{numbers[0]}", f"{numbers[-1]}"
        heads = ", ".join(f"(layer, {number})" for number in numbers[:3]) + ", ..." * (len(numbers) > 3)
        one_head = f"one head, L{layer}H{head}" if len(numbers) == 2 else "places in a flattened table of heads"
        write = (
            f'"L{layer}H{head}" or ({layer}, {head})'
            if len(numbers) == 2
            else "list(zip(*np.unravel_index(places, (n_layers, n_heads))))"
        )
        raise BadHead(
            f"{text} has two readings: {one_head}, or {len(numbers)} heads of one layer. Write {write} for the first, "
            f"[{heads}] for the second" + "; token ids are prompts, not heads" * (len(numbers) > 2)
        )
    if listed and isinstance(listed[0], list) and getattr(given, "ndim", 0) >= 2 and len(listed[0]) != 2:
        raise BadHead(
            f"an array of heads has a row of layer and head for each, [heads, 2]; found shape {tuple(given.shape)}: "
            "np.argwhere(...) returns such rows; token ids are prompts, not heads"
        )


def refuse_head(given: Any) -> NoReturn:
    """Raise BadHead for a value that is not a head. The message says what the value is, if that is recognised, and the
    forms of heads.
    """
    for names, what in ((_LAYER, "a whole layer"), (_GROUP, "a key/value group")):
        if isinstance(given, str) and (match := names.fullmatch(given.strip())):
            raise BadHead(f"{given!r} is {what}, and here heads are named one by one, such as L{match[1]}H0")
    raise BadHead(f"{not_a(given, 'a head')}: {HEAD_FORMS}{naming_nodes(given)}")
