"""Effects of ablations: losses with standard errors, sweeps over all heads, and their summary."""

from tlspectral.ablation.bands import band_effects
from tlspectral.ablation.losses import Effect, Loss, induction_loss, language_loss, paired_effect
from tlspectral.ablation.summary import summarize_sweep
from tlspectral.ablation.sweep import ablation_sweep
from tlspectral.ablation.text import packaged_text

__all__ = [
    "Effect",
    "Loss",
    "ablation_sweep",
    "band_effects",
    "induction_loss",
    "language_loss",
    "packaged_text",
    "paired_effect",
    "summarize_sweep",
]
