"""The argument `at=` of sweeps and edges: positions that are ablated one at a time, and their names in tables."""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.containers import are_columns, is_array, plain, values
from tlspectral.errors.settings import whole_number
from tlspectral.models.running.batches import PackedTokens, position_of


def is_one_position(at: Any) -> bool:
    """Return True if `at` is one position for all prompts: a name, or a whole number of any library."""
    return isinstance(at, str) or whole_number(at) is not None


def listed_positions(at: Any) -> list[Any] | None:
    """Return the argument `at` as a list of positions, with one entry if it is a single position; None for None.

    Raises TypeError for an array of numbers: it may list several positions, or one position per prompt.
    """
    at = plain(at)
    if at is None or is_one_position(at):
        return None if at is None else [at]
    listed = values(at)
    if are_columns(at) and isinstance(at, tuple):
        raise TypeError(
            f"at= is a tuple of {len(at)} arrays or lists, which has two readings: a result of np.where, or a list of "
            "positions per prompt. Write a list of lists for positions per prompt"
        )
    if is_array(at) and listed and all(whole_number(position) is not None for position in listed):
        raise TypeError(
            f"at={' '.join(repr(at).split())[:100]} has two readings. Write at={listed[:3]} for {len(listed)} "
            f"positions, a row for each; write at=[{listed[:3]}] for one position of each prompt"
        )
    return [at] if listed is None else listed


def asked_positions(prompts: PackedTokens, listed: Iterable[Any]) -> list[tuple[str | int, Int[Tensor, "sequences"]]]:
    """Return pairs (label in tables, positions [sequences]) for the entries of `at=`, without duplicates.

    `prompts` are the tokenized prompts, `listed` the entries. A name or number is its own label. An entry with one
    position per prompt is labelled "given", or "given 1", "given 2" if there are several. Positions count from 0.
    Raises ValueError for an empty list, a position that a prompt does not have, and two different entries with one
    label; TypeError for numbers that are not whole.
    """
    labelled: list[tuple[str | int, Tensor]] = []
    entries = [*listed]
    if not entries:
        raise ValueError("at=[] has no positions: give some, or leave at= out")
    of_prompts = [place for place, entry in enumerate(entries) if not is_one_position(entry)]
    for place, entry in enumerate(entries):
        label: Any = str(entry) if isinstance(entry, str) else whole_number(entry)
        positions = position_of(prompts, entry if label is None else label)
        if label is None:
            label = "given" if len(of_prompts) == 1 else f"given {1 + of_prompts.index(place)}"
        same_label = [earlier for name, earlier in labelled if str(name) == str(label)]
        if not same_label:
            labelled.append((label, positions))
        elif not torch.equal(same_label[0], positions):
            raise ValueError(
                f"at= has two positions that the table would call {str(label)!r}: give the task's position another name"
            )
    return labelled
