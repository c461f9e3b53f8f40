"""Figures of the tables: a DataFrame in, a matplotlib Figure out."""

from tlspectral.studies.fingerprint.figures.checkpoints import checkpoint_acts
from tlspectral.plots.effects import ablation_effects, kernel
from tlspectral.studies.fingerprint.figures.formation import formation
from tlspectral.plots.head_grid import head_grid
from tlspectral.plots.percentile_strip import percentile_strip
from tlspectral.plots.plane import content_direction_plane
from tlspectral.plots.positional import (
    attention_traces,
    frequency_grid,
    frequency_norms,
    frequency_path,
    frequency_profile,
    plane_by_query,
    positional_symbolic_plane,
    rotary_plane,
    score_agreement,
    score_heatmaps,
    score_histograms,
)
from tlspectral.studies.bifocal.figures.training import evolution

__all__ = [
    "ablation_effects",
    "attention_traces",
    "checkpoint_acts",
    "content_direction_plane",
    "evolution",
    "formation",
    "frequency_grid",
    "frequency_norms",
    "frequency_path",
    "frequency_profile",
    "head_grid",
    "kernel",
    "percentile_strip",
    "plane_by_query",
    "positional_symbolic_plane",
    "rotary_plane",
    "score_agreement",
    "score_heatmaps",
    "score_histograms",
]
