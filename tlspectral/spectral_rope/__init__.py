"""Rotary positions with learnable frequency, amplitude and phase ("Bifocal Attention"), in new and old models."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names
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

# The HookedTransformer, and TransformerLens with it, is imported when it is first asked for.
__getattr__ = lazy_names(__name__, {"SpectralHookedTransformer": "hooked"})
