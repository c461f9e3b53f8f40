"""Constrained training: which spectral channels of the query-key operator a circuit needs while it forms.

Two-layer attention-only models learn the random-map task freely, with a symmetric `M = W_Q W_K^T`, or without phase
`Im(M_t)` ("Fingerprint, Not Blueprint", FP, section 10). `python -m tlspectral.training.constrained -o FOLDER` trains
the grid.
"""

from tlspectral.training.constrained.cell import CellRun, train_cell
from tlspectral.training.constrained.contrasts import formation_tests
from tlspectral.training.constrained.formation import formation
from tlspectral.training.constrained.grid import constrained_grid
from tlspectral.training.constrained.penalties import phase_penalty, symmetric_penalty
from tlspectral.training.constrained.presets import ARMS, PRESETS, Arm, Preset
from tlspectral.training.constrained.rerouting import previous_token_heads, rerouting

__all__ = [
    "ARMS",
    "PRESETS",
    "Arm",
    "CellRun",
    "Preset",
    "constrained_grid",
    "formation",
    "formation_tests",
    "phase_penalty",
    "previous_token_heads",
    "rerouting",
    "symmetric_penalty",
    "train_cell",
]
