"""How far a head sees: the first tokens of a sequence and a window of the last keys."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.selection import whole_number


@dataclass(frozen=True)
class Reach:
    """The keys that a head without its `"long_range"` part still sees.

    Attributes:
        window: the last keys, the query's own token among them; at least 1.
        sinks: tokens at the start of a sequence, padding not counted.
    """

    window: int
    sinks: int

    def __post_init__(self) -> None:
        window, sinks = whole_number(self.window), whole_number(self.sinks)
        if window is None or window < 1:
            raise ValueError(f"window is a whole number of keys from 1 (the token itself) up; found {self.window!r}")
        if sinks is None or sinks < 0:
            raise ValueError(f"sinks is a whole number of first tokens from 0 up; found {self.sinks!r}")

    def beyond(self, visible: Bool[Tensor, "*rows pos pos"]) -> Bool[Tensor, "*rows pos pos"]:
        """Tell which of the visible pairs of query and key the head no longer sees."""
        at = torch.arange(visible.shape[-1], device=visible.device)
        # A token sees itself and padding does not: this numbers the tokens of a sequence from 1.
        place = visible.diagonal(dim1=-2, dim2=-1).cumsum(-1)
        return visible & (at[:, None] - at >= self.window) & (place > self.sinks)[..., None, :]

    def limited(self, scores: Float[Tensor, "*rows pos pos"]) -> Float[Tensor, "*rows pos pos"]:
        """Return masked scores in which pairs out of reach are masked too; the others stay equal to the bit."""
        lowest = torch.finfo(scores.dtype).min
        return scores.masked_fill(self.beyond(scores > lowest / 2), lowest)
