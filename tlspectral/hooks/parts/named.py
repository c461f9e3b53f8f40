"""Parts by name."""

from typing import Any, Literal

from tlspectral.hooks.parts.blocks import Content, Interaction, Position
from tlspectral.hooks.parts.long_range import LongRange
from tlspectral.hooks.parts.output import Output
from tlspectral.hooks.parts.part import Part
from tlspectral.hooks.parts.query_key import Antisymmetric, Band, RopePhase, Symmetric
from tlspectral.selection import chosen_part
from tlspectral.tables.schema import columns

PartName = Literal["symmetric", "antisymmetric", "rope_phase", "output", "M_S", "M_A", "Im(M_t)"]
"""A part without settings, by its name or by its symbol in "Fingerprint, Not Blueprint"."""

(PART,) = columns("part | label | What was removed, under the name or the symbol that was asked for.")
"""The column that names a part. Its settings are in the table's `attrs`."""

_BY_NAME = {kind.name: kind for kind in (Symmetric, Antisymmetric, RopePhase, Output)}
_WITH_SETTINGS = {
    Band.name: "Band(frequencies)",
    LongRange.name: "LongRange(window, sinks=0)",
    **{kind.name: f"{kind.__name__}(prompt)" for kind in (Content, Position, Interaction)},
}


def part_of(part: Part | str) -> Part:
    """Return a part that is given as a value, by its name or by its symbol in "Fingerprint, Not Blueprint".

    >>> from tlspectral.hooks.parts import part_of
    >>> part_of("M_S")
    Symmetric(include_bias=False)

    Raises:
        ValueError: no such part, or one that needs settings and is given by name.
    """
    if isinstance(part, Part):
        return part
    if isinstance(part, str) and part in _WITH_SETTINGS:
        raise ValueError(f"{part!r} has settings: give tls.parts.{_WITH_SETTINGS[part]} in place of its name")
    kind: Any = _BY_NAME[chosen_part(part, _BY_NAME)]
    return kind()
