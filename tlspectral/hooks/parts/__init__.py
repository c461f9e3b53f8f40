"""Parts of attention heads, as values: what `ablate`, sweeps and edges take away.

    tls.ablate(model, "L5H1", "rope_phase")
    tls.ablate(model, "L5H1", tls.parts.RopePhase(frequencies=[0, 1]))

A part without settings also goes by its name: `"symmetric"`, `"antisymmetric"`, `"symmetric_static"`,
`"antisymmetric_static"`, `"rope_phase"`, `"output"`, or `"M_S"`, `"M_A"`, `"Im(M_t)"`. Under rotary positions `"M_S"`
and `"M_A"` are the parts as they act at each distance, and the static ones the parts of M at distance 0 (see
`Symmetric`).
"""

from __future__ import annotations

from typing import Literal

from tlspectral.hooks.parts.checked_calls import require_part
from tlspectral.hooks.parts.content_position import Content, Interaction, Position
from tlspectral.hooks.parts.long_range import LongRange
from tlspectral.hooks.parts.mode import Mode
from tlspectral.hooks.parts.output import Output
from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.query_key import Antisymmetric, Band, QueryKeyPart, RopePhase, Symmetric
from tlspectral.selection import chosen_part

__all__ = [
    "Antisymmetric",
    "Band",
    "Content",
    "Interaction",
    "LongRange",
    "Mode",
    "Output",
    "Part",
    "PartName",
    "Position",
    "QueryKeyPart",
    "RopePhase",
    "Symmetric",
    "part_of",
]

PartName = Literal[
    "symmetric",
    "antisymmetric",
    "symmetric_static",
    "antisymmetric_static",
    "rope_phase",
    "output",
    "M_S",
    "M_A",
    "Im(M_t)",
]
"""A part without settings, by its name or by its symbol in "Fingerprint, Not Blueprint"."""

_BY_NAME: dict[str, Part] = {
    part.name: part
    for part in (
        Symmetric(),
        Antisymmetric(),
        Symmetric(static=True),
        Antisymmetric(static=True),
        RopePhase(),
        Output(),
    )
}
_WITH_SETTINGS = {
    Band: "Band(frequencies)",
    LongRange: "LongRange(window, sinks=0)",
    Mode: "Mode(modes)",
    **{kind: f"{kind.__name__}(prompt)" for kind in (Content, Position, Interaction)},
}


def part_of(part: Part | str) -> Part:
    """Return a part that is given as a value, by its name or by its symbol in "Fingerprint, Not Blueprint".

    >>> from tlspectral.hooks.parts import part_of
    >>> part_of("M_S")
    Symmetric(include_bias=False, static=False)

    Raises:
        ValueError: no such part, or one that needs settings and is given by name or as its class.
        ValueError, TypeError: a part of your own without a name or the function of the place where it acts, or whose
            functions take other arguments.
    """
    if isinstance(part, Part):
        require_part(part)
        return part
    for kind, call in _WITH_SETTINGS.items():
        if part in (kind, kind.name, kind.__name__):
            raise ValueError(f"{kind.__name__} has settings: give tls.parts.{call}, not {part!r}")
    return _BY_NAME[chosen_part(part, _BY_NAME)]
