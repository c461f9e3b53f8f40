"""Figures of the fingerprint study: tables in, matplotlib Figures out."""

from tlspectral_studies.fingerprint.figures.checkpoints import checkpoint_acts
from tlspectral_studies.fingerprint.figures.formation import formation

__all__ = ["checkpoint_acts", "formation"]
