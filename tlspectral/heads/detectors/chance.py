"""Chance levels by layer: the score of uniform attention, which is equal in layers whose queries see the same keys."""

import hashlib
from collections.abc import Mapping, Sequence
from math import nan

import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.models.hooking.strips import Strip, strips
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.long_prompts import STRIP

ByLayer = float | int | None | dict[str, float | int | None]
"""One value for all layers, or a dict from layer name ("L3") to value. None: unknown, or no query counts."""


class SeenKeys:
    """The keys that each query of the model in `view` sees in a prompt of `n_positions` tokens without padding.

    Layers with equal windows share one mask.

    Attributes:
        mask_of: for each layer, the index of its mask.
        picked: layers in which an indexer picks keys by the tokens, so that a mask does not say which keys are seen.
    """

    def __init__(self, view: AttentionView, n_positions: int):
        self.view = view
        self.mask_of: dict[int, int] = {}
        self.picked: set[int] = set()
        self._layer_of: dict[bytes, int] = {}  # the first layer with a mask, by the mask's digest
        for layer in view.layers:
            if (view.reader.selected_keys(view.model, layer) or n_positions) < n_positions:
                self.picked.add(layer)
            mask = hashlib.sha256()
            for strip in strips(n_positions, STRIP):
                mask.update(self._rows(layer, strip).numpy().tobytes())
            self._layer_of.setdefault(mask.digest(), layer)
            self.mask_of[layer] = [*self._layer_of].index(mask.digest())

    def _rows(self, layer: int, strip: Strip) -> Bool[Tensor, "query key"]:
        """Return the mask of a layer for the queries and keys of a strip, on the CPU: True where a query sees a key."""
        return self.view.reader.seen_keys(self.view.model, layer, strip.n_keys, strip.start).cpu().contiguous()

    def uniform(self, strip: Strip) -> Float64[Tensor, "masks query key"]:
        """Return, for each mask, the attention of a head that gives equal weight to all keys that a query sees, for the
        queries and keys of a strip: [masks, query, key].
        """
        seen = torch.stack([self._rows(layer, strip) for layer in self._layer_of.values()]).double()
        return seen / seen.sum(-1, keepdim=True)

    def by_layer(self, values: Sequence[float]) -> ByLayer:
        """Return one value if all layers have the same value, else a dict such as {"L0": .5, "L1": .1}.

        `values` has one value per mask. Layers in which an indexer picks the keys by the tokens get None.
        """
        levels = {layer: values[place] for layer, place in self.mask_of.items()}
        return one_or_by_layer(levels | dict.fromkeys(self.picked, nan))


def one_or_by_layer(values: Mapping[int, float | int]) -> ByLayer:
    """Return one value if all layers have the same, else a dict from layer name ("L3") to value. NaN becomes None.

    `values` is a dict from layer number to value.
    """
    by_name = {f"L{layer}": None if value != value else value for layer, value in values.items()}
    return by_name if len(set(by_name.values())) > 1 else next(iter(by_name.values()), None)
