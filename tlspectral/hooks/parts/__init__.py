"""The parts of an attention head that `ablate`, `ablation_sweep` and edges can remove, as values.

    tls.ablate(model, "L5H1", "rope_phase")
    tls.ablate(model, "L5H1", tls.parts.RopePhase(frequencies=[0, 1]))

A part without settings can also be given by its name; `PartName` lists the names. Every part takes `at=`, the token
position at which it is removed (see `Part`).
"""

from __future__ import annotations

from typing import Literal

from tlspectral.errors import shown
from tlspectral.hooks.parts.checked_calls import require_part
from tlspectral.hooks.parts.content_position import Content, Interaction, Position
from tlspectral.hooks.parts.long_range import LongRange
from tlspectral.hooks.parts.mode import Mode
from tlspectral.hooks.parts.output import Output
from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.query_key import Antisymmetric, Band, QueryKeyPart, RopePhase, Symmetric
from tlspectral.selection.parts_as_written import chosen_part

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
"""Names of the parts without settings. The symbols are from "Fingerprint, Not Blueprint".

- `"symmetric"` or `"M_S"`: `Symmetric()`, the symmetric part of the score at each distance of the two tokens.
- `"antisymmetric"` or `"M_A"`: `Antisymmetric()`, the antisymmetric part of the score at each distance.
- `"symmetric_static"`, `"antisymmetric_static"`: the same two parts of the query-key matrix M alone, at distance 0.
- `"rope_phase"` or `"Im(M_t)"`: `RopePhase()`, the part of the score that changes sign with the distance.
- `"output"`: `Output()`, everything that the head writes.
"""

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
    """Return the `Part` for a name such as "M_S", or check a `Part` and return it.

    Use it in a function of your own that takes a part by name or by value, as `tls.ablate` does.

    >>> from tlspectral.hooks.parts import part_of
    >>> part_of("M_S")
    Symmetric(include_bias=False, static=False)

    Args:
        part: a value of `tls.parts`, or a name: "symmetric" or "M_S", "antisymmetric" or "M_A", "symmetric_static",
            "antisymmetric_static", "rope_phase" or "Im(M_t)", "output".

    Returns:
        A `Part`, to give to `tls.ablate` or `tls.ablation_sweep`.

    Raises:
        ValueError: an unknown name; or a part that needs settings, such as "mode", was given by name or as a class.
        ValueError, TypeError: a part of your own has no name, has no method for the place where it acts, or has a
            method with other arguments.
    """
    if isinstance(part, Part):
        require_part(part)
        return part
    for kind, call in _WITH_SETTINGS.items():
        if part is kind or (isinstance(part, str) and part in (kind.name, kind.__name__)):
            raise ValueError(f"{kind.__name__} has settings: give tls.parts.{call}, not {shown(part)}")
    return _BY_NAME[chosen_part(part, _BY_NAME)]
