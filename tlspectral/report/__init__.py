"""One HTML page about a table of heads, which loads nothing from a network: `tls.report.report(heads)`."""

from tlspectral.report.page import Page, report

__all__ = ["Page", "report"]
