"""The sequences that a sweep takes means or other outputs from."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from tlspectral.hooks.replacement import Replacement, drawn_donors, from_reference
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.padding import PackedTokens
from tlspectral.models.attention.prompts import packed_prompts
from tlspectral.tasks import ScoredSequences


@dataclass(frozen=True)
class Reference:
    """Sequences that replace the output of heads, and which of them replaces it for each sequence of the task.

    Attributes:
        how: as `replace` of `ablate`.
        sequences: those that replace.
        donors: one of them for each sequence of the task; None for means.
        seed: of the draw.
    """

    how: Literal["mean", "resample"]
    sequences: PackedTokens
    donors: Int[Tensor, "rows"] | None
    seed: int

    @property
    def digest(self) -> str:
        """Hash of the sequences."""
        return self.sequences.hashed()

    def replacement(self, view: AttentionView, layer: int, heads: list[int]) -> Replacement:
        """Run the sequences and return what replaces the output of these heads."""
        return from_reference(view, {layer: heads}, self.how, self.sequences, self.seed, self.donors)[layer]


def reference_of(
    view: AttentionView, sequences: ScoredSequences, how: Literal["mean", "resample"], reference: Any, seed: int
) -> Reference:
    """Return the reference of a sweep: prompts in any form that a `Task` takes; None is the task's own sequences.

    Raises as `packed_prompts`; ValueError for one sequence that is its own reference, or sequences to resample that are
    not all of one length.
    """
    given = sequences if reference is None else packed_prompts(view, reference)
    n = len(sequences.tokens)
    if reference is None and n < 2:
        raise ValueError(
            f"the task has one sequence, and replace={how!r} takes from the others: give more prompts, or reference="
        )
    if how == "mean":
        return Reference(how, given, None, seed)
    found = torch.cat([given.lengths, sequences.lengths])
    shortest, longest = int(found.min()), int(found.max())
    if shortest != longest:
        raise ValueError(
            "replace='resample' takes the output of each position from another sequence, and these have "
            f"{shortest} to {longest} tokens: give prompts of one length, or replace='mean'"
        )
    return Reference(how, given, drawn_donors(n, None if reference is None else len(given.tokens), seed), seed)
