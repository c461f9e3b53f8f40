"""Claims of the papers in words, each decided by its own words from the published tables."""

from tlspectral_studies.fingerprint.replication.sentences import (
    ablations,
    bifocal,
    constrained,
    formation_order,
    head_function,
    history,
    phase,
    positional_symbolic,
    positions,
)
from tlspectral_studies.fingerprint.replication.sentences.sentence import SENTENCE_VERDICTS, Choice, Reading, Sentence

__all__ = [
    "SENTENCE_VERDICTS",
    "Choice",
    "Reading",
    "Sentence",
    "ablations",
    "bifocal",
    "constrained",
    "formation_order",
    "head_function",
    "history",
    "phase",
    "positional_symbolic",
    "positions",
]
