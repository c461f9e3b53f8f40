"""Head tables over the saved checkpoints of a training ("Fingerprint, Not Blueprint", section 9 and figure 4)."""

from tlspectral.history.checkpoint_tables import HeadHistory
from tlspectral.history.recording import head_history
from tlspectral.history.sources import suite_checkpoints

__all__ = [
    "HeadHistory",
    "head_history",
    "suite_checkpoints",
]
