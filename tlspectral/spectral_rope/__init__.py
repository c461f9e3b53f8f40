"""Rotary positions with learnable frequency, amplitude and phase ("Bifocal Attention"), in new and existing models."""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names
from tlspectral.spectral_rope.loading import load_spectral
from tlspectral.spectral_rope.merge import merge
from tlspectral.spectral_rope.model import to_spectral
from tlspectral.spectral_rope.module import SpectralRoPE
from tlspectral.spectral_rope.rates import parameter_groups
from tlspectral.spectral_rope.saving import save_spectral

if TYPE_CHECKING:
    from tlspectral.spectral_rope.meter import OmegaMeter, omega_shift
    from tlspectral.spectral_rope.spectral_hooked_transformer import SpectralHookedTransformer

__all__ = [
    "OmegaMeter",
    "SpectralHookedTransformer",
    "SpectralRoPE",
    "load_spectral",
    "merge",
    "omega_shift",
    "parameter_groups",
    "save_spectral",
    "to_spectral",
]

# TransformerLens and transformers are imported only when a name that needs them is first used.
__getattr__, __dir__ = lazy_names(__name__)
