"""`at=` of sweeps and edges: positions at each of which something acts alone, by the names that tables print."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.containers import are_columns, is_array, plain, values
from tlspectral.models.running.batches import PackedTokens, position_of
from tlspectral.selection import whole_number


def is_one_position(at: Any) -> bool:
    """Return whether this is one position of all prompts: a name of the task's positions or a number of any library."""
    return isinstance(at, str) or whole_number(at) is not None


def listed_positions(at: Any) -> list[Any] | None:
    """Return the positions that `at=` lists, or the one that it is; None for None.

    Raises TypeError for an array of numbers, which may be several positions or one of each prompt.
    """
    at = plain(at)
    if at is None or is_one_position(at):
        return None if at is None else [at]
    listed = values(at)
    if are_columns(at) and isinstance(at, tuple):
        raise TypeError(
            f"at= has two readings: a tuple of {len(at)} arrays or lists may come from np.where, with a column of "
            "positions in each, or hold the positions of each prompt. Write a list of lists for the second"
        )
    if is_array(at) and listed and all(whole_number(one) is not None for one in listed):
        raise TypeError(
            f"at={' '.join(repr(at).split())[:100]} has two readings: {len(listed)} positions, a row for each, or one "
            f"position of each prompt. Write at={listed[:3]} for the first, at=[{listed[:3]}] for the second"
        )
    return [at] if listed is None else listed


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
