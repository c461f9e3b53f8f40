"""One HTML page about a table of heads, which loads nothing from a network."""

from tlspectral.report.page import report

__all__ = ["report"]
