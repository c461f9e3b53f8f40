"""Figures of training with learnable frequencies: tables in, matplotlib Figures out."""

from tlspectral.studies.bifocal.figures.training import evolution

__all__ = ["evolution"]
