"""What holds of every architecture and backend: one row each, and properties asked of it one after another.

A new architecture is a line in `zoo_shapes.SHAPES`. A new property is a function of a row under `@asked`, in a module
that is imported here, with a plain recomputation beside it.
"""

from . import (  # noqa: F401 - asked in this order
    circuits,
    edges,
    edits,
    long_prompts,
    penalties,
    positional,
    reading,
    scoring,
    spectral,
    spectral_models,
    sweeps,
    untouched,
)
from .rows import Row, cases

__all__ = ["Row", "cases"]
