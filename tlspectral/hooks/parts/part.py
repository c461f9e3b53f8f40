"""What a part of a head is: a value that says what is taken away, and where in a run it acts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import position_of, positions_by_place
from tlspectral.models.running.given import numbers


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """Acts at one position per sequence, `at`; None means everywhere."""

    at: Any = None

    def __post_init__(self) -> None:
        if self.at is not None and not isinstance(self.at, str):
            at = numbers(self.at) if isinstance(self.at, Tensor) else positions_by_place(self.at, "at")
            object.__setattr__(self, "at", at)

    def placed(self, at: Any) -> Any:
        """Return a copy that acts at other positions. A class of your own need not be a dataclass."""
        moved = copy(self)
        object.__setattr__(moved, "at", at)
        Placed.__post_init__(moved)
        return moved

    def of_rows(self, rows: slice) -> Any:
        """Return the same for a run of some of the sequences that it is settled for."""
        return self.placed(self.at[rows]) if isinstance(self.at, Tensor) else self

    def acts(self, rows: int, n_positions: int) -> Bool[Tensor, "rows pos"] | None:
        """Return where it acts in a run; None for everywhere.

        Raises ValueError for positions that the run does not have, or of another number of prompts.
        """
        if self.at is None:
            return None
        at = torch.as_tensor(self.at).reshape(-1)
        if len(at) not in (1, rows):
            raise ValueError(
                f"at has positions of {len(at)} prompts, and this run has {rows}: run all of them at once, or use "
                "ablation_sweep, which runs them in batches"
            )
        if int(at.max()) >= n_positions:
            raise ValueError(f"at={int(at.max())} is no position of this run, which has 0 to {n_positions - 1}")
        return (at[:, None] == torch.arange(n_positions)).expand(rows, -1)


@dataclass(frozen=True, eq=False, repr=False)
class Part(Placed, ABC):
    """A part of some heads that is taken away.

    Attributes:
        at: where it is taken away: None for everywhere; a name of the task's positions, such as `"S2"`; or a position
            for all prompts or one for each, counted from its first token, negative from its end. It is the position of
            what a head writes: of a part of the scores, the position of the query.
        name: name of the part in tables and folders.
        acts_on: what of a head's attention it changes: scores before the softmax; the mask, so that keys are not seen;
            or z, what the head hands to its output map.
        control: what a sweep removes in its place, of equal size: a random product of the head's own queries and keys
            (`"scores"`), the same numbers of other blocks (`"blocks"`), a random set of rotary pairs (`"frequencies"`),
            random directions of the column space of W_Q (`"modes"`), or the same of another head of the layer
            (`"heads"`).
    """

    name: ClassVar[str]
    acts_on: ClassVar[Literal["scores", "mask", "z"]] = "scores"
    control: ClassVar[Literal["scores", "blocks", "frequencies", "modes", "heads"]] = "scores"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings for `attrs` and the manifest, without those at their default."""
        return {}

    def __repr__(self) -> str:
        shown = {one.name: getattr(self, one.name) for one in fields(self)}
        at = shown.pop("at")
        shown |= {} if at is None else {"at": at}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def fixed(self, view: AttentionView, prompts: Any) -> Part:
        """Return the part with all that depends on the model and on the packed prompts of a run settled.

        A measurement that shares out its work settles a part once; its `settings` are then complete. Raises ValueError
        for a position that a prompt does not have.
        """
        settled = self._settled(view, prompts)
        return settled if self.at is None else settled.placed(position_of(prompts, self.at))

    def _settled(self, view: AttentionView, prompts: Any) -> Part:
        """Return the part with all but its position settled."""
        return self

    @abstractmethod
    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, Any]:
        """Bind the part to heads by layer; layers on which it removes nothing are left out.

        What is bound acts on scores (`QueryKeyPart`, `BlockPart`), on the mask (`LongRange`) or on z (`Replacement`).
        """
