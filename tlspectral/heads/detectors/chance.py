"""Chance levels by layer: the score of uniform attention, which is equal in layers whose queries see the same keys."""

from collections.abc import Mapping, Sequence
from math import nan

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.models.reading.view import AttentionView

ByLayer = float | int | None | dict[str, float | int | None]
"""One value for all layers, or a dict from layer name ("L3") to value. None: unknown, or no query counts."""


class SeenKeys:
    """The keys that each query of the model in `view` sees in a prompt of `n_positions` tokens without padding.

    Layers with equal windows share one mask.

    Attributes:
        masks: the different masks [pos, pos], True where the query sees the key, on the CPU.
        mask_of: for each layer, the index of its mask in `masks`.
        picked: layers in which an indexer picks keys by the tokens, so that a mask does not say which keys are seen.
    """

    def __init__(self, view: AttentionView, n_positions: int):
        self.masks: list[Bool[Tensor, "pos pos"]] = []
        self.mask_of: dict[int, int] = {}
        self.picked: set[int] = set()
        for layer in view.layers:
            if (view.reader.selected_keys(view.model, layer) or n_positions) < n_positions:
                self.picked.add(layer)
            mask = view.reader.seen_keys(view.model, layer, n_positions).cpu()
            place = next((place for place, known in enumerate(self.masks) if torch.equal(known, mask)), None)
            if place is None:
                place = len(self.masks)
                self.masks.append(mask)
            self.mask_of[layer] = place

    def uniform(self) -> Float64[Tensor, "masks query key"]:
        """Return, for each mask, the attention of a head that gives equal weight to all keys that a query sees: [masks,
        query, key].
        """
        seen = torch.stack(self.masks).double()
        return seen / seen.sum(-1, keepdim=True)

    def by_layer(self, values: Sequence[float]) -> ByLayer:
        """Return one value if all layers have the same value, else a dict such as {"L0": .5, "L1": .1}.

        `values` has one value per mask in `masks`. Layers in which an indexer picks the keys by the tokens get None.
        """
        levels = {layer: values[place] for layer, place in self.mask_of.items()}
        return one_or_by_layer(levels | dict.fromkeys(self.picked, nan))


def one_or_by_layer(values: Mapping[int, float | int]) -> ByLayer:
    """Return one value if all layers have the same, else a dict from layer name ("L3") to value. NaN becomes None.

    `values` is a dict from layer number to value.
    """
    by_name = {f"L{layer}": None if value != value else value for layer, value in values.items()}
    return by_name if len(set(by_name.values())) > 1 else next(iter(by_name.values()), None)
