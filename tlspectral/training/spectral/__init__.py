"""Training evidence on learnable rotary positions ("Bifocal Attention"): languages, a small Llama, Spectral Evolution.

`python -m tlspectral.training.spectral.experiments NAME -o FOLDER` runs the experiments.
"""

from tlspectral.training.spectral.evolution import Evolution, EvolutionSettings, evolve
from tlspectral.training.spectral.formal_languages import BioRotation, Dyck3, LanguageBatch, Modulo7
from tlspectral.training.spectral.llama import ARMS, LlamaConfig, SpectralArm, SpectralLlama

__all__ = [
    "ARMS",
    "BioRotation",
    "Dyck3",
    "Evolution",
    "EvolutionSettings",
    "LanguageBatch",
    "LlamaConfig",
    "Modulo7",
    "SpectralArm",
    "SpectralLlama",
    "evolve",
]
