"""The part of a head's attention that goes to far keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tlspectral.hooks.parts.part import Part
from tlspectral.models.reading.view import AttentionView, require_causal
from tlspectral.selection import whole_number


@dataclass(frozen=True, eq=False, repr=False)
class LongRange(Part):
    """Attention to the keys between the first tokens and the last ones.

    Attributes:
        window: how many of the last keys a head still sees, the query's own token among them.
        sinks: how many of the first tokens it still sees, of each document where a mask keeps the documents of a row
            apart; padding is no first token.

    Raises:
        ValueError: no whole numbers, a window below 1, or sinks below 0.

    >>> import tlspectral as tls
    >>> tls.parts.LongRange(window=8, sinks=1)
    LongRange(window=8, sinks=1)
    """

    name = "long_range"
    acts_on = "mask"
    window: int
    sinks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        window, sinks = whole_number(self.window), whole_number(self.sinks)
        if window is None or window < 1:
            raise ValueError(f"window is a whole number of keys from 1 (the token itself) up; found {self.window!r}")
        if sinks is None or sinks < 0:
            raise ValueError(f"sinks is a whole number of first tokens from 0 up; found {self.sinks!r}")

    @property
    def settings(self) -> Mapping[str, Any]:
        """The window and the sinks."""
        return {"window": self.window, "sinks": self.sinks}

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, LongRange]:
        """Bind the part to layers: it is the same on all. Raises UnsupportedArchitecture for an encoder."""
        require_causal(view, "long range counts the keys before a query")
        return dict.fromkeys(by_layer, self)

    def beyond(
        self, visible: Bool[Tensor, "*rows pos pos"], own: Bool[Tensor, "pos pos"]
    ) -> Bool[Tensor, "*rows pos pos"]:
        """Tell which of the visible pairs of query and key the head no longer sees.

        `own` are the pairs that the layer shows by itself, without padding: where a token does not see the last one
        in front, and the layer by itself would show it, a document of a packed row begins, whose sinks are counted from
        there.
        """
        at = torch.arange(visible.shape[-1], device=visible.device)
        real = visible.diagonal(dim1=-2, dim2=-1)  # a token sees itself, and padding does not
        before = torch.where(real, at, -1).cummax(-1).values.roll(1, -1)
        before[..., 0] = -1
        last = before.clamp_min(0)
        hidden = own.to(at.device)[at.expand_as(last), last] & ~visible.gather(-1, last[..., None])[..., 0]
        begins = real & ((before < 0) | hidden)
        place = real.cumsum(-1)
        first = torch.where(begins, place, 0).cummax(-1).values
        return visible & (at[:, None] - at >= self.window) & (place - first >= self.sinks)[..., None, :]
