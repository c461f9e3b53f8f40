"""Commands of the study of "Fingerprint, Not Blueprint", mounted under `tlspectral study`."""

from tlspectral.studies.fingerprint.commands import formation, replicate, schemes
from tlspectral.studies.fingerprint.commands.app import app

__all__ = ["app", "formation", "replicate", "schemes"]
