"""Head tables over the saved steps of a training.

Source: "Fingerprint, Not Blueprint" (FP, section 9 and Fig. 4).
"""

from tlspectral.history.checkpoint_tables import HeadHistory
from tlspectral.history.recording import head_history
from tlspectral.history.sources import suite_checkpoints

__all__ = [
    "HeadHistory",
    "head_history",
    "suite_checkpoints",
]
