"""How heads came to be what they are: the head table at every saved step of a training, and the questions put to it.

Source: "Fingerprint, Not Blueprint" (FP, section 9 and Fig. 4).
"""

from tlspectral.history.result import HeadHistory
from tlspectral.history.in_context import InContextScore, in_context_score
from tlspectral.history.population import population_medians, within_model_percentile
from tlspectral.studies.fingerprint.history_questions import (
    Crossing,
    Departure,
    FormationCrossing,
    eventual_head_rank,
    formation_crossing,
    median_leaves_null,
)
from tlspectral.history.recording import head_history
from tlspectral.history.sources import (
    PYTHIA_STEPS,
    LazyCheckpoint,
    folder_checkpoints,
    hub_checkpoints,
    training_checkpoints,
)

__all__ = [
    "PYTHIA_STEPS",
    "Crossing",
    "Departure",
    "FormationCrossing",
    "HeadHistory",
    "InContextScore",
    "LazyCheckpoint",
    "eventual_head_rank",
    "folder_checkpoints",
    "formation_crossing",
    "head_history",
    "hub_checkpoints",
    "in_context_score",
    "median_leaves_null",
    "population_medians",
    "training_checkpoints",
    "within_model_percentile",
]
