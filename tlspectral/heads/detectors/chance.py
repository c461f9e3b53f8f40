"""Values by layer that are alike where layers let their queries see the same keys, such as a chance level."""

from collections.abc import Mapping, Sequence
from math import nan

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.models.reading.view import AttentionView

ByLayer = float | int | None | dict[str, float | int | None]
"""A value of all layers, or values by the name of a layer, such as L3. None where it is not known or nothing counts."""


class SeenKeys:
    """The keys that each query of a prompt sees, without padding: one mask for all layers of equal windows.

    Attributes:
        masks: [pos, pos] each, on the CPU.
        mask_of: the place in `masks` of each layer's mask.
        picked: layers in which an indexer picks, by the tokens, which of the keys a query sees.
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
        """Return the attention of a head that attends alike to all keys that its queries see."""
        seen = torch.stack(self.masks).double()
        return seen / seen.sum(-1, keepdim=True)

    def by_layer(self, values: Sequence[float]) -> ByLayer:
        """Return values that each mask has as `one_or_by_layer` does, None for layers with picked keys."""
        levels = {layer: values[place] for layer, place in self.mask_of.items()}
        return one_or_by_layer(levels | dict.fromkeys(self.picked, nan))


def one_or_by_layer(values: Mapping[int, float | int]) -> ByLayer:
    """Return the value of all layers where they agree, else a value for each by its name. NaN becomes None."""
    found = {f"L{layer}": None if value != value else value for layer, value in values.items()}
    return found if len(set(found.values())) > 1 else next(iter(found.values()), None)
