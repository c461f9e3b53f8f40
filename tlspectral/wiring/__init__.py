"""The wiring of heads: causal edges into what a head reads, and one attention score as a sum of what was written."""

from tlspectral.wiring.attribution import qk_attribution
from tlspectral.wiring.edges import edge_effects

__all__ = ["edge_effects", "qk_attribution"]
