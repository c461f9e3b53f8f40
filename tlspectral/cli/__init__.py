"""The command line, one file per kind of command.

Everything heavy is imported inside the commands, so that help and version answer at once.
"""

from tlspectral.cli import ablate, analyze, figures, positional, report, statistics
from tlspectral.studies.fingerprint.commands import schemes as compare, replicate
from tlspectral.cli.app import app, main

__all__ = ["ablate", "analyze", "app", "compare", "figures", "main", "positional", "replicate", "report", "statistics"]
