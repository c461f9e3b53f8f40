"""One page about a table of heads: a file that opens in a browser and asks nothing of a network."""

from tlspectral.report.page import report

__all__ = ["report"]
