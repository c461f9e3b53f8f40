"""The command line, one file per kind of command.

Commands import heavy modules inside their functions, so that help and version are printed at once.
"""

from tlspectral.cli import ablate, analyze, collect, demo, pictures, positional, reasons, report, study, table, walls
from tlspectral.cli.app import app, main

__all__ = [
    "ablate",
    "analyze",
    "app",
    "collect",
    "demo",
    "main",
    "pictures",
    "positional",
    "reasons",
    "report",
    "study",
    "table",
    "walls",
]
