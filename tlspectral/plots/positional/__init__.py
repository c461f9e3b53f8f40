"""Figures of positional and symbolic scores: tables of `tlspectral.positional` in, matplotlib Figures out.

They follow "Decoupling Positional and Symbolic Attention Behavior" (PS), Figures 1, 3, 5, 6 and 7, in colours that
survive print and colour blindness.
"""

from tlspectral.plots.positional.exclusion import exclusion_plane, heads_over_tasks
from tlspectral.plots.positional.frequencies import (
    frequency_grid,
    frequency_norms,
    frequency_path,
    frequency_profile,
)
from tlspectral.plots.positional.heads import (
    exclusion_heatmap,
    exclusion_histograms,
    score_agreement,
    score_heatmaps,
    score_histograms,
)
from tlspectral.plots.positional.plane import plane_by_query, positional_symbolic_plane
from tlspectral.plots.positional.traces import attention_traces, rotary_plane

__all__ = [
    "attention_traces",
    "exclusion_heatmap",
    "exclusion_histograms",
    "exclusion_plane",
    "frequency_grid",
    "frequency_norms",
    "frequency_path",
    "frequency_profile",
    "heads_over_tasks",
    "plane_by_query",
    "positional_symbolic_plane",
    "rotary_plane",
    "score_agreement",
    "score_heatmaps",
    "score_histograms",
]
