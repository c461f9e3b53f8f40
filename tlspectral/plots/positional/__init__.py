"""Figures of positional and symbolic scores: tables of `tlspectral.positional` in, matplotlib Figures out.

They follow "Decoupling Positional and Symbolic Attention Behavior" (PS), Figures 1, 3, 5, 6 and 7, in colours that
survive print and colour blindness.
"""

from tlspectral.plots.positional.frequencies import (
    frequency_grid,
    frequency_norms,
    frequency_path,
    frequency_profile,
)
from tlspectral.plots.positional.heads import score_agreement, score_heatmaps, score_histograms
from tlspectral.plots.positional.plane import plane_by_query, positional_symbolic_plane
from tlspectral.plots.positional.traces import attention_traces, rotary_plane

__all__ = [
    "attention_traces",
    "frequency_grid",
    "frequency_norms",
    "frequency_path",
    "frequency_profile",
    "plane_by_query",
    "positional_symbolic_plane",
    "rotary_plane",
    "score_agreement",
    "score_heatmaps",
    "score_histograms",
]
