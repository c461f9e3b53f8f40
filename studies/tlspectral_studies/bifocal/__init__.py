"""Training evidence on learnable rotary positions ("Bifocal Attention"): languages, a small Llama, Spectral Evolution.

`tlspectral study learn EXPERIMENT -o FOLDER` runs the experiments. By hand: a language, a `SpectralLlama` of an arm,
`evolve` with `answer_loss`, and then `score_answers`, `lock_in_step`, `resonance_gain`, `depth_manifold`.
"""

from typing import TYPE_CHECKING

from tlspectral.lazy import lazy_names

if TYPE_CHECKING:
    from tlspectral_studies.bifocal.depth_manifold import depth_manifold
    from tlspectral_studies.bifocal.evolution import Evolution, EvolutionSettings, evolve
    from tlspectral_studies.bifocal.formal_languages import BioRotation, Dyck3, LanguageBatch, Modulo7
    from tlspectral_studies.bifocal.language_runs import answer_loss, score_answers
    from tlspectral_studies.bifocal.languages import lock_in_step
    from tlspectral_studies.bifocal.llama import ARMS, LlamaConfig, SpectralArm, SpectralLlama
    from tlspectral_studies.bifocal.resonance import phase_drift, resonance_gain

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
    "answer_loss",
    "depth_manifold",
    "evolve",
    "lock_in_step",
    "phase_drift",
    "resonance_gain",
    "score_answers",
]

# The commands of the study stand in this package, and `tlspectral study --help` imports no torch for them.
__getattr__, __dir__ = lazy_names(__name__)
