"""One table row per attention head, one per head and rotary frequency, and how far rounding moves them."""

from tlspectral.heads.analysis import analyze_heads
from tlspectral.heads.frequencies import frequency_table
from tlspectral.heads.noise import weight_noise_band

__all__ = ["analyze_heads", "frequency_table", "weight_noise_band"]
