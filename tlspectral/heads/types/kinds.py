"""The types of heads: what each is scored on, from what effect on a head may be called one, and who described it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class HeadType:
    """One type of head.

    Attributes:
        name: as in the column `type`.
        floor: effect (score less chance) from which a head can be claimed, in the unit of the score. Floors were fixed
            before the table of SmolLM2-135M was made, that of `local` after a pilot on two rows of text.
        queries: for a pattern of attention, the copy of a repeated segment whose queries are scored; None for others.
        source: where the type was described.
        check: how `check_head_types` ended for it on SmolLM2-135M; "unchecked" where no head was claimed to check.
    """

    name: str
    floor: float
    queries: Literal["segment", "copy"] | None
    source: str
    check: Literal["passed", "failed", "unchecked"]


CANDIDATES = (
    HeadType("previous_token", 0.2, "segment", "Elhage et al. 2021; Olsson et al. 2022", "passed"),
    HeadType("duplicate", 0.2, "copy", "Wang et al. 2022, IOI", "failed"),
    HeadType("induction", 0.2, "copy", "Olsson et al. 2022", "passed"),
    HeadType("first_token", 0.5, "segment", "Xiao et al. 2023, StreamingLLM", "failed"),
    HeadType("local", 0.2, "segment", "Child et al. 2019; Clark et al. 2019", "failed"),
    HeadType("self", 0.2, "segment", "Clark et al. 2019", "failed"),
    HeadType("copy_suppression", 0.1, None, "McDougall et al. 2023", "unchecked"),
    HeadType("retrieval", 0.1, None, "Wu et al. 2024", "unchecked"),
)
"""All that were defined and checked."""
TYPES = tuple(kind for kind in CANDIDATES if kind.check != "failed")
"""Those that `head_types` has: a type whose causal check failed is dropped."""
RELIABLE = 0.9
"""Rank correlation over heads between two texts from which heads of a type can be claimed."""
