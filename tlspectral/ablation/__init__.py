"""Effects of ablations: sweeps over all heads, their summary, bands of rotary frequencies, heads of a type removed."""

from tlspectral.ablation.bands import band_effects
from tlspectral.ablation.controls import random_head_sets
from tlspectral.ablation.summary import summarize_sweep
from tlspectral.ablation.sweep import ablation_sweep
from tlspectral.ablation.type_checks import check_head_types

__all__ = ["ablation_sweep", "band_effects", "check_head_types", "random_head_sets", "summarize_sweep"]
