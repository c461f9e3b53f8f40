"""Figures of the tables: a DataFrame in, a matplotlib Figure out."""

from tlspectral.plots.effects import ablation_effects, kernel
from tlspectral.plots.plane import content_direction_plane

__all__ = ["ablation_effects", "content_direction_plane", "kernel"]
