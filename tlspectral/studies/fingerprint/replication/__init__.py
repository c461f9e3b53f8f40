"""The published tables of "Fingerprint, Not Blueprint" (FP), and every number that can be recomputed from them."""

from tlspectral.heads.model_statistics import another_model
from tlspectral.studies.fingerprint.replication.claims import VERDICTS, Claim, PublishedTables
from tlspectral.studies.fingerprint.replication.constrained_training import side_by_side
from tlspectral.studies.fingerprint.replication.contrast import SchemeContrast, scheme_contrast
from tlspectral.studies.fingerprint.replication.ioi import IOI_CLASSES, ioi_classes
from tlspectral.studies.fingerprint.replication.positional_schemes import POSITIONS
from tlspectral.tables.published import (
    PUBLISHED_CHECKPOINTS,
    PUBLISHED_HEADS,
    ConstrainedTables,
    published_checkpoints,
    published_constrained,
    published_heads,
    published_kernels,
)
from tlspectral.studies.fingerprint.replication.table import markdown, replicate

__all__ = [
    "IOI_CLASSES",
    "POSITIONS",
    "PUBLISHED_CHECKPOINTS",
    "PUBLISHED_HEADS",
    "VERDICTS",
    "Claim",
    "ConstrainedTables",
    "PublishedTables",
    "SchemeContrast",
    "another_model",
    "ioi_classes",
    "markdown",
    "published_checkpoints",
    "published_constrained",
    "published_heads",
    "published_kernels",
    "replicate",
    "scheme_contrast",
    "side_by_side",
]
