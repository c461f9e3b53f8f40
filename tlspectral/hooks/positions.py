"""`at=` of sweeps and edges: positions at each of which something acts alone, by the names that tables print."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.models.running.batches import PackedTokens, position_of
from tlspectral.selection import whole_number


def is_one_position(at: Any) -> bool:
    """Return whether this is one position of all prompts: a name of the task's positions or a number of any library."""
    return isinstance(at, str) or whole_number(at) is not None


def listed_positions(at: Any) -> list[Any] | None:
    """Return the positions that `at=` lists, or the one that it is; None for None."""
    if at is None:
        return None
    return [*at] if isinstance(at, Iterable) and not is_one_position(at) else [at]


def asked_positions(prompts: PackedTokens, listed: Iterable[Any]) -> list[tuple[str | int, Int[Tensor, "sequences"]]]:
    """Return how each position is called, and where it is in each prompt, in their order, each once.

    Names and numbers are called as they are given; positions of each prompt `"given"`, with a number where there are
    several. Raises ValueError for none, for one that a prompt does not have, and for two that tables would print alike,
    TypeError for no whole numbers.
    """
    found: list[tuple[str | int, Tensor]] = []
    each = [*listed]
    if not each:
        raise ValueError("at=[] has no positions: give some, or leave at= out")
    of_prompts = [place for place, one in enumerate(each) if not is_one_position(one)]
    for place, one in enumerate(each):
        asked: Any = str(one) if isinstance(one, str) else whole_number(one)
        positions = position_of(prompts, one if asked is None else asked)
        if asked is None:
            asked = "given" if len(of_prompts) == 1 else f"given {1 + of_prompts.index(place)}"
        alike = [other for name, other in found if str(name) == str(asked)]
        if not alike:
            found.append((asked, positions))
        elif not torch.equal(alike[0], positions):
            raise ValueError(
                f"at= has two positions that the table would call {str(asked)!r}: give the task's position another name"
            )
    return found
