"""Which heads and other writers of the residual stream make a head attend where it does."""

from tlspectral.wiring.attribution import qk_attribution

__all__ = ["qk_attribution"]
