"""Forward hooks that remove a part of a head's query-key operator from a running model."""

from tlspectral.hooks.ablation import ablate, ablation_hooks
from tlspectral.hooks.edge_reach import EdgeReach, heads_reached

__all__ = ["EdgeReach", "ablate", "ablation_hooks", "heads_reached"]
