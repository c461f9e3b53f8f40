"""Training evidence on learnable rotary positions ("Bifocal Attention"): languages, a small Llama, Spectral Evolution.

`tlspectral study learn EXPERIMENT -o FOLDER` runs the experiments.
"""

from tlspectral_studies.bifocal.evolution import Evolution, EvolutionSettings, evolve
from tlspectral_studies.bifocal.formal_languages import BioRotation, Dyck3, LanguageBatch, Modulo7
from tlspectral_studies.bifocal.llama import ARMS, LlamaConfig, SpectralArm, SpectralLlama

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
