"""Arguments of `ablate`: which go together, and the rotary pairs that are meant."""

from collections.abc import Iterable
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from tlspectral.errors import UnsupportedArchitecture
from tlspectral.hooks.parts import Part
from tlspectral.models.attention import AttentionLayer
from tlspectral.rotary import pair_mask

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
) -> None:
    """Raise a ValueError where an argument is missing or does not go with the part."""
    if frequencies is not None and part not in ("rope_phase", "rotary_band"):
        raise ValueError(f"frequencies choose rotary pairs, and {part!r} is not made of them")
    if part == "rotary_band" and frequencies is None:
        raise ValueError("rotary_band needs frequencies: the pairs whose contribution is dropped")
    if include_bias and part in ("output", "long_range"):
        raise ValueError(f"include_bias has a meaning for parts of the scores only, not for {part!r}")
    if replace not in ("zero", "mean", "resample"):
        raise ValueError(f"replace must be 'zero', 'mean' or 'resample', not {replace!r}")
    if replace != "zero" and part != "output":
        raise ValueError(f"replace={replace!r} says what a head writes instead: it goes with 'output', not {part!r}")
    if reference is not None and replace == "zero":
        raise ValueError("reference goes with replace='mean' or 'resample': zeros are taken from no sequence")
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
