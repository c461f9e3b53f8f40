"""The command line, one file per kind of command.

Everything heavy is imported inside the commands, so that help and version answer at once.
"""

from tlspectral.cli import ablate, analyze, positional, study, table
from tlspectral.cli.app import app, main

__all__ = ["ablate", "analyze", "app", "main", "positional", "study", "table"]
