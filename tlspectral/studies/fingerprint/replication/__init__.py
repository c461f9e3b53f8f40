"""Every number and every testable sentence of "Fingerprint, Not Blueprint" (FP), from its published tables."""

from tlspectral.studies.fingerprint.replication.claims import VERDICTS, PublishedTables
from tlspectral.studies.fingerprint.replication.constrained_training import side_by_side
from tlspectral.studies.fingerprint.replication.head_function import ioi_classes
from tlspectral.studies.fingerprint.replication.markdown import counted, deciding, markdown
from tlspectral.studies.fingerprint.replication.positional_schemes import POSITIONS, scheme_contrast
from tlspectral.studies.fingerprint.replication.published_runs import beside_markdown, beside_published
from tlspectral.studies.fingerprint.replication.sentences import SENTENCE_VERDICTS
from tlspectral.studies.fingerprint.replication.table import replicate

__all__ = [
    "POSITIONS",
    "SENTENCE_VERDICTS",
    "VERDICTS",
    "PublishedTables",
    "beside_markdown",
    "beside_published",
    "counted",
    "deciding",
    "ioi_classes",
    "markdown",
    "replicate",
    "scheme_contrast",
    "side_by_side",
]
