"""The canonical tasks learned by one head with chosen rotary frequencies: training in stacks, sweep, trajectories.

Tasks, sizes and angles are those of "Decoupling Positional and Symbolic Attention Behavior" (PS, sections 4 and 5 and
appendix D.1).
"""

from tlspectral_studies.positional_symbolic.canonical.answer_shape import answer_shape
from tlspectral_studies.positional_symbolic.canonical.behaviour import head_behaviour
from tlspectral_studies.positional_symbolic.canonical.model import CanonicalHeads, CanonicalRun, angle_unit
from tlspectral_studies.positional_symbolic.canonical.schedule import PRESETS, CanonicalSchedule
from tlspectral_studies.positional_symbolic.canonical.state import saved_heads
from tlspectral_studies.positional_symbolic.canonical.sweep import BASE_ANGLES, CanonicalSweep, canonical_sweep
from tlspectral_studies.positional_symbolic.canonical.trainer import (
    CanonicalTraining,
    accuracy_by_position,
    train_canonical,
)
from tlspectral_studies.positional_symbolic.canonical.trajectories import query_key_trajectories

__all__ = [
    "BASE_ANGLES",
    "PRESETS",
    "CanonicalHeads",
    "CanonicalRun",
    "CanonicalSchedule",
    "CanonicalSweep",
    "CanonicalTraining",
    "accuracy_by_position",
    "angle_unit",
    "answer_shape",
    "canonical_sweep",
    "head_behaviour",
    "query_key_trajectories",
    "saved_heads",
    "train_canonical",
]
