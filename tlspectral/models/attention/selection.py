"""Heads as a caller names them, by pairs or table rows, checked against the model and grouped by layer."""

import operator
from collections.abc import Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pandas as pd
import torch

from tlspectral.errors import BadHead
from tlspectral.models.attention.view import AttentionView

if TYPE_CHECKING:
    from tlspectral.models.checkpoints import CheckpointLayers

Heads = Iterable[Any] | pd.DataFrame
HEAD_FORMS = "heads are (layer, head) pairs of whole numbers, as [(1, 2)], or a DataFrame with columns layer and head"
_NAMES = ("layer", "head")


def heads_by_layer(view: "AttentionView | CheckpointLayers", heads: Heads) -> dict[int, list[int]]:
    """Return the chosen heads by layer, layers and heads sorted, each head once.

    Args:
        view: the model's view, or its layers in files.
        heads: (layer, head) pairs, or a DataFrame with these columns.

    Raises:
        BadHead: a layer or head that does not exist, or heads in none of these forms.
    """
    if isinstance(heads, pd.MultiIndex) and set(heads.names) == set(_NAMES):
        heads = heads.to_frame(index=False)
    if isinstance(heads, pd.DataFrame):
        if not set(_NAMES) <= set(heads.columns):
            raise BadHead(f"a DataFrame with columns {', '.join(map(str, heads.columns))} names no heads: {HEAD_FORMS}")
        heads = zip(heads["layer"], heads["head"], strict=True)
    if isinstance(heads, str) or not isinstance(heads, Iterable):
        _refuse(heads)
    chosen: dict[int, list[int]] = {}
    for layer, head in sorted({head_pair(head) for head in heads}):
        if not 0 <= layer < view.n_layers:
            raise BadHead(f"L{layer}H{head} does not exist: the model has layers 0 to {view.n_layers - 1}")
        chosen.setdefault(layer, []).append(head)
    for layer, indices in chosen.items():
        n_heads = view.n_heads(layer)
        wrong = [head for head in indices if not 0 <= head < n_heads]
        if wrong:
            raise BadHead(f"L{layer}H{wrong[0]} does not exist: layer {layer} has heads 0 to {n_heads - 1}")
    return chosen


def head_pair(head: Any) -> tuple[int, int]:
    """Return layer and head of one pair, or of a table row by its fields `layer` and `head`.

    Raises:
        BadHead: `head` is no pair of whole numbers.
    """
    if isinstance(head, pd.Series) and set(_NAMES) <= set(head.index):
        pair: tuple[Any, ...] = (head["layer"], head["head"])
    elif set(_NAMES) <= set(getattr(head, "_fields", ())):
        pair = (head.layer, head.head)
    elif isinstance(head, Iterable) and not isinstance(head, str | bytes | Mapping | Set):
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
    return layer, index


def whole_number(value: Any) -> int | None:
    """Return an integer of any library, or of a float that holds one (columns with NaN); None for anything else."""
    if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) is torch.bool:
        return None
    if isinstance(value, float | np.floating):
        return int(value) if float(value).is_integer() else None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _refuse(given: Any) -> NoReturn:
    raise BadHead(f"{given!r} names no head: {HEAD_FORMS}")
