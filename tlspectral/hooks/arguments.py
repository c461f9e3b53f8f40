"""Arguments of `ablate`: which go together, the rotary pairs that are meant, and how far a head still sees."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.parts import Part
from tlspectral.models.attention import AttentionLayer
from tlspectral.rotary import pair_mask
from tlspectral.selection import BLOCK_PARTS, whole_number

Frequencies = Iterable[Any] | Tensor | None


def check_arguments(
    part: Part,
    frequencies: Frequencies = None,
    include_bias: bool = False,
    *,
    replace: str = "zero",
    reference: Any = None,
    window: int | None = None,
    sinks: int = 0,
    blocks: Any = None,
) -> None:
    """Raise a ValueError where an argument is missing or does not go with the part."""
    if frequencies is not None and part not in ("rope_phase", "rotary_band"):
        raise ValueError(f"frequencies choose rotary pairs, and {part!r} is not made of them")
    if part == "rotary_band" and frequencies is None:
        raise ValueError("rotary_band needs frequencies: the pairs whose contribution is dropped")
    if include_bias and part in ("output", "long_range", *BLOCK_PARTS):
        raise ValueError(f"include_bias has a meaning for parts of M only, not for {part!r}")
    if replace not in ("zero", "mean", "resample"):
        raise ValueError(f"replace must be 'zero', 'mean' or 'resample', not {replace!r}")
    if replace != "zero" and part != "output":
        raise ValueError(f"replace={replace!r} says what a head writes instead: it goes with 'output', not {part!r}")
    if reference is not None and replace == "zero":
        raise ValueError("reference goes with replace='mean' or 'resample': zeros are taken from no sequence")
    if part in BLOCK_PARTS and blocks is None:
        raise ValueError(f"{part!r} needs blocks: the BlockPrompt whose blocks are the keys")
    if part not in BLOCK_PARTS and blocks is not None:
        raise ValueError(f"blocks go with {', '.join(map(repr, BLOCK_PARTS))}, not with {part!r}")
    if part == "long_range" and window is None:
        raise ValueError("long_range needs window: how many of the last keys a head still sees, its own token included")
    if part != "long_range" and (window is not None or sinks != 0):
        raise ValueError(f"window and sinks go with 'long_range', not with {part!r}")


def chosen_pairs(layer: AttentionLayer, part: Part, frequencies: Frequencies) -> Bool[Tensor, "pairs"] | None:
    """Return a mask over the layer's rotary pairs, None for all."""
    if part not in ("rope_phase", "rotary_band"):
        return None
    if layer.rotary is None:
        raise UnsupportedArchitecture(f"layer {layer.layer}: no rotary positions, so there is no {part} to remove")
    if frequencies is None:
        return None
    try:
        return pair_mask(frequencies, layer.rotary.n_pairs)
    except ValueError as error:
        raise ValueError(f"layer {layer.layer}: {error}") from error


@dataclass(frozen=True)
class Reach:
    """The keys that a head without its `"long_range"` part still sees.

    These are the last `window`, the query's own token among them, and the first `sinks`, padding not counted.
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
