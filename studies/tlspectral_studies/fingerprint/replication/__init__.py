"""Every number and every testable sentence of "Fingerprint, Not Blueprint" (FP), from its published tables."""

from tlspectral_studies.fingerprint.replication.claims import VERDICTS, PublishedTables
from tlspectral_studies.fingerprint.replication.constrained_training import arms_beside_published
from tlspectral_studies.fingerprint.replication.head_function import ioi_classes
from tlspectral_studies.fingerprint.replication.positional_schemes import POSITIONS, scheme_contrast
from tlspectral_studies.fingerprint.replication.published_runs import beside_markdown, beside_published
from tlspectral_studies.fingerprint.replication.readable import counted, deciding, readable, rule_finds
from tlspectral_studies.fingerprint.replication.sentences import SENTENCE_VERDICTS
from tlspectral_studies.fingerprint.replication.table import replicate

__all__ = [
    "POSITIONS",
    "SENTENCE_VERDICTS",
    "VERDICTS",
    "PublishedTables",
    "arms_beside_published",
    "beside_markdown",
    "beside_published",
    "counted",
    "deciding",
    "ioi_classes",
    "readable",
    "replicate",
    "rule_finds",
    "scheme_contrast",
]
