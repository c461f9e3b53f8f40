"""Placebos of rotary phase: pairs of columns that the model does not turn together, and RoPE where there is none."""

from tlspectral.heads.placebo_attenuation import PlaceboAttenuation, placebo_attenuation
from tlspectral.heads.placebos import permuted_pairing, pseudo_rope

__all__ = ["PlaceboAttenuation", "permuted_pairing", "placebo_attenuation", "pseudo_rope"]
