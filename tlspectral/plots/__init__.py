"""Figures of the tables: a DataFrame in, a matplotlib Figure out, which a notebook shows as the last line of a cell.

A figure of one panel draws into `ax`, axes of the caller's, and returns their figure; those of several panels lay
themselves out and take none.
"""

from tlspectral.plots.attribution import qk_attribution
from tlspectral.plots.effects import ablation_effects, kernel
from tlspectral.plots.head_changes import head_changes
from tlspectral.plots.head_grid import head_grid
from tlspectral.plots.percentile_strip import percentile_strip
from tlspectral.plots.plane import content_direction_plane
from tlspectral.plots.positional.exclusion import exclusion_plane, heads_over_tasks
from tlspectral.plots.positional.frequencies import frequency_grid, frequency_norms, frequency_path, frequency_profile
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
    "ablation_effects",
    "attention_traces",
    "content_direction_plane",
    "exclusion_heatmap",
    "exclusion_histograms",
    "exclusion_plane",
    "frequency_grid",
    "frequency_norms",
    "frequency_path",
    "frequency_profile",
    "head_changes",
    "head_grid",
    "heads_over_tasks",
    "kernel",
    "percentile_strip",
    "plane_by_query",
    "positional_symbolic_plane",
    "qk_attribution",
    "rotary_plane",
    "score_agreement",
    "score_heatmaps",
    "score_histograms",
]
