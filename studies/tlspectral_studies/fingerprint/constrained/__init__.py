"""Constrained training: which spectral channels of the query-key operator a circuit needs while it forms.

Two-layer attention-only models learn the random-map task freely, with a symmetric `M = W_Q W_K^T`, or without phase
`Im(M_t)` ("Fingerprint, Not Blueprint", FP, section 10). `tlspectral study constrained -o FOLDER`
trains the grid.
"""

from tlspectral_studies.fingerprint.constrained.cell import train_cell
from tlspectral_studies.fingerprint.constrained.formation import formation, formation_tests
from tlspectral_studies.fingerprint.constrained.grid import constrained_grid
from tlspectral_studies.fingerprint.constrained.penalties import phase_penalty, symmetric_penalty
from tlspectral_studies.fingerprint.constrained.presets import ARMS, PRESETS, Arm, Preset
from tlspectral_studies.fingerprint.constrained.rerouting import previous_token_heads, rerouting
from tlspectral_studies.fingerprint.constrained.saved_cells import cell_checkpoints, cell_model

__all__ = [
    "ARMS",
    "PRESETS",
    "Arm",
    "Preset",
    "cell_checkpoints",
    "cell_model",
    "constrained_grid",
    "formation",
    "formation_tests",
    "phase_penalty",
    "previous_token_heads",
    "rerouting",
    "symmetric_penalty",
    "train_cell",
]
