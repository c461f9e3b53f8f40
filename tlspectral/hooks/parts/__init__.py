"""Parts of attention heads, as values: what `ablate`, sweeps and edges take away.

    tls.ablate(model, "L5H1", "rope_phase")
    tls.ablate(model, "L5H1", tls.parts.RopePhase(frequencies=[0, 1]))

A part without settings also goes by its name: `"symmetric"`, `"antisymmetric"`, `"rope_phase"`, `"output"`, or `"M_S"`,
`"M_A"`, `"Im(M_t)"`.
"""

from tlspectral.hooks.parts.blocks import BlockRemoval, Content, Interaction, Position
from tlspectral.hooks.parts.long_range import LongRange
from tlspectral.hooks.parts.named import PartName, part_of
from tlspectral.hooks.parts.output import Output, Replacement
from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.query_key import Antisymmetric, Band, RopePhase, ScoreRemoval, Symmetric

Bound = ScoreRemoval | BlockRemoval | LongRange | Replacement
"""A part on heads of one layer, as `Part.on` returns it."""

__all__ = [
    "Antisymmetric",
    "Band",
    "Bound",
    "Content",
    "Interaction",
    "LongRange",
    "Output",
    "Part",
    "PartName",
    "Position",
    "RopePhase",
    "Symmetric",
    "part_of",
]
