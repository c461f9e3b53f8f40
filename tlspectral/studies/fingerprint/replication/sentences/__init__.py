"""Claims of the papers in words, each with its strictest and its kindest reading by the published tables."""

from tlspectral.studies.fingerprint.replication.sentences import (
    ablations,
    bifocal,
    constrained,
    head_function,
    history,
    phase,
    positional_symbolic,
    positions,
)
from tlspectral.studies.fingerprint.replication.sentences.sentence import SENTENCE_VERDICTS, Reading, Sentence

__all__ = [
    "SENTENCE_VERDICTS",
    "Reading",
    "Sentence",
    "ablations",
    "bifocal",
    "constrained",
    "head_function",
    "history",
    "phase",
    "positional_symbolic",
    "positions",
]
