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
from tlspectral.plots.positional import (
    attention_traces,
    exclusion_heatmap,
    exclusion_histograms,
    exclusion_plane,
    frequency_grid,
    frequency_norms,
    frequency_path,
    frequency_profile,
    heads_over_tasks,
    plane_by_query,
    positional_symbolic_plane,
    rotary_plane,
    score_agreement,
    score_heatmaps,
    score_histograms,
)

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
