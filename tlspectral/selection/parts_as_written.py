"""Read names of parts as users write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from tlspectral.errors import did_you_mean, kind_of, not_a, shown

Symbol = Literal["M_S", "M_A", "Im(M_t)"]
"""Symbols of parts in "Fingerprint, Not Blueprint"."""

_PARTS: dict[str, str] = {"M_S": "symmetric", "M_A": "antisymmetric", "Im(M_t)": "rope_phase"}


def chosen_part(part: str, known: Iterable[str]) -> Any:
    """Return the name of a part of a head, given by its name ("symmetric") or by its symbol in the papers ("M_S").

    Raises:
        ValueError: it is not one of the `known` names; the message gives the nearest.
    """
    known = list(known)
    name = _PARTS.get(part, part) if isinstance(part, str) else None
    if name in known:
        return name
    symbols = [symbol for symbol, named in _PARTS.items() if named in known]
    forms = f"part must be one of {', '.join(map(repr, [*known, *symbols]))}"
    if kind_of(part) not in ("", "a part"):
        raise ValueError(f"{not_a(part, 'a part')}: {forms}, or a value of tls.parts")
    hint = did_you_mean(part, [*known, *symbols]) if isinstance(part, str) else ""
    raise ValueError(f"{forms}; not {shown(part)}{hint}")
