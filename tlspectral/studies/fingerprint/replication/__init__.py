"""Every number of "Fingerprint, Not Blueprint" (FP) that can be computed again from its published tables."""

from tlspectral.studies.fingerprint.replication.claims import VERDICTS, Claim, PublishedTables
from tlspectral.studies.fingerprint.replication.constrained_training import side_by_side
from tlspectral.studies.fingerprint.replication.head_function import IOI_CLASSES, ioi_classes
from tlspectral.studies.fingerprint.replication.positional_schemes import POSITIONS, SchemeContrast, scheme_contrast
from tlspectral.studies.fingerprint.replication.published_runs import (
    BesidePublished,
    beside_markdown,
    beside_published,
)
from tlspectral.studies.fingerprint.replication.table import markdown, replicate

__all__ = [
    "IOI_CLASSES",
    "POSITIONS",
    "VERDICTS",
    "BesidePublished",
    "Claim",
    "PublishedTables",
    "SchemeContrast",
    "beside_markdown",
    "beside_published",
    "ioi_classes",
    "markdown",
    "replicate",
    "scheme_contrast",
    "side_by_side",
]
