"""One table row per attention head, one per head and rotary frequency, how far rounding moves them, two tables."""

from tlspectral.heads.analysis import analyze_heads
from tlspectral.heads.comparison import compare_heads
from tlspectral.heads.frequencies import frequency_table
from tlspectral.heads.noise import statistic_noise, weight_noise_band, weight_noise_draws

__all__ = [
    "analyze_heads",
    "compare_heads",
    "frequency_table",
    "statistic_noise",
    "weight_noise_band",
    "weight_noise_draws",
]
