"""Head tables over the saved steps of a training.

Source: "Fingerprint, Not Blueprint" (FP, section 9 and Fig. 4).
"""

from tlspectral.history.measure import HeadHistory, population_medians
from tlspectral.history.recording import head_history
from tlspectral.history.sources import PYTHIA_STEPS, suite_checkpoints

__all__ = [
    "PYTHIA_STEPS",
    "HeadHistory",
    "head_history",
    "population_medians",
    "suite_checkpoints",
]
