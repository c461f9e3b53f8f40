"""Forward hooks that remove a part of a head's query-key operator from a running model."""

from tlspectral.hooks.ablation import ablate, ablation_hooks

__all__ = ["ablate", "ablation_hooks"]
