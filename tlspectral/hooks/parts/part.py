"""What a part of a head is: a value that says what is taken away, and where in a run it acts."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from tlspectral.models.attention import AttentionView


class Part(ABC):
    """A part of some heads that is taken away.

    Attributes:
        name: name of the part in tables and folders.
        acts_on: what of a head's attention it changes: scores before the softmax; the mask, so that keys are not seen;
            or z, what the head hands to its output map.
        control: what a sweep removes in its place, of equal size: a random product of the head's own queries and keys
            (`"scores"`), the same numbers of other blocks (`"blocks"`), or the same of another head of the layer
            (`"heads"`).
    """

    name: ClassVar[str]
    acts_on: ClassVar[Literal["scores", "mask", "z"]] = "scores"
    control: ClassVar[Literal["scores", "blocks", "heads"]] = "scores"

    @property
    def settings(self) -> Mapping[str, Any]:
        """What tables and folders hold of the part besides its name, as far as it is settled: no defaults."""
        return {}

    def fixed(self, view: AttentionView, prompts: Any) -> "Part":
        """Return the part with all that depends on the model and on the packed prompts of a run settled.

        A measurement that shares out its work settles a part once; its `settings` are then complete.
        """
        return self

    @abstractmethod
    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, Any]:
        """Bind the part to heads by layer; layers on which it removes nothing are left out.

        What is bound acts on scores (`ScoreRemoval`), on the mask (`LongRange`) or on z (`Replacement`).
        """
