"""One table row per attention head, and one per head and rotary frequency."""

from tlspectral.heads.analysis import analyze_heads
from tlspectral.heads.frequencies import frequency_table

__all__ = ["analyze_heads", "frequency_table"]
