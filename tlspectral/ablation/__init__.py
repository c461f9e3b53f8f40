"""Effects of ablations: sweeps over all heads, their summary, bands of rotary frequencies."""

from tlspectral.ablation.bands import band_effects
from tlspectral.ablation.effects import random_head_sets
from tlspectral.ablation.summary import summarize_sweep
from tlspectral.ablation.sweep import ablation_sweep

__all__ = ["ablation_sweep", "band_effects", "random_head_sets", "summarize_sweep"]
