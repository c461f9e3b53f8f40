"""The wiring of heads: causal edges into what a head reads."""

from tlspectral.wiring.edges import edge_effects

__all__ = ["edge_effects"]
