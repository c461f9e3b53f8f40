"""Which heads a caller means: pairs or table rows, checked against the model and sorted by layer."""

from collections.abc import Iterable
from typing import Any

import pandas as pd

from tlspectral.errors import BadHead
from tlspectral.models.attention.view import AttentionView

Heads = Iterable[Any] | pd.DataFrame


def heads_by_layer(view: AttentionView, heads: Heads) -> dict[int, list[int]]:
    """Heads of each chosen layer, both in order and each once.

    Args:
        view: of the model.
        heads: (layer, head) pairs, or a DataFrame with these columns.

    Raises:
        BadHead: a layer or head that does not exist.
    """
    if isinstance(heads, pd.DataFrame):
        heads = zip(heads["layer"], heads["head"], strict=True)
    chosen: dict[int, list[int]] = {}
    for layer, head in sorted({(int(layer), int(head)) for layer, head in heads}):
        if not 0 <= layer < view.n_layers:
            raise BadHead(f"L{layer}H{head} does not exist: the model has layers 0 to {view.n_layers - 1}")
        chosen.setdefault(layer, []).append(head)
    for layer, found in chosen.items():
        n_heads = view.n_heads(layer)
        wrong = [head for head in found if not 0 <= head < n_heads]
        if wrong:
            raise BadHead(f"L{layer}H{wrong[0]} does not exist: layer {layer} has heads 0 to {n_heads - 1}")
    return chosen
