"""The published tables of "Fingerprint, Not Blueprint" (FP), and every number that can be recomputed from them."""

from tlspectral.replication.another_model import another_model
from tlspectral.replication.claims import VERDICTS, Claim, PublishedTables
from tlspectral.replication.constrained_training import side_by_side
from tlspectral.replication.contrast import SchemeContrast, scheme_contrast
from tlspectral.replication.ioi import IOI_CLASSES, ioi_classes
from tlspectral.replication.positional_schemes import POSITIONS
from tlspectral.replication.published import (
    PUBLISHED_CHECKPOINTS,
    PUBLISHED_HEADS,
    ConstrainedTables,
    published_checkpoints,
    published_constrained,
    published_heads,
    published_kernels,
)
from tlspectral.replication.table import markdown, replicate

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
