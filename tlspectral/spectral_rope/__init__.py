"""Rotary positions with learnable frequency, amplitude and phase ("Bifocal Attention"), in new and old models."""

from typing import TYPE_CHECKING, Any

from tlspectral.spectral_rope.merge import merge
from tlspectral.spectral_rope.model import SpectralModel, to_spectral
from tlspectral.spectral_rope.module import SpectralRoPE
from tlspectral.spectral_rope.rates import parameter_groups
from tlspectral.spectral_rope.storage import load_spectral, save_spectral

if TYPE_CHECKING:
    from tlspectral.spectral_rope.hooked import SpectralHookedTransformer

__all__ = [
    "SpectralHookedTransformer",
    "SpectralModel",
    "SpectralRoPE",
    "load_spectral",
    "merge",
    "parameter_groups",
    "save_spectral",
    "to_spectral",
]


def __getattr__(name: str) -> Any:
    """Import the HookedTransformer, and TransformerLens with it, when it is first asked for."""
    if name != "SpectralHookedTransformer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tlspectral.spectral_rope.hooked import SpectralHookedTransformer

    return SpectralHookedTransformer
