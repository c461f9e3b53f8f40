"""The detectors: which keys each scores, and what its columns mean.

A detector is added here. The code that measures it, the columns of the head table and of `detect_heads`, the comparison
of two tables, edges and the report all read these records, which therefore stand on a low floor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Detector:
    """A score of a head: its mean attention from each query to the keys of one kind.

    Attributes:
        name: of its column.
        kind: what heads with a high score are called.
        key: on sequences [BOS, r, r] with segments of L tokens, the position of the key, from the position of a query
            in the second copy and L.
        target: that key, in the words of the head table.
        target_in_copy: the same in the words of `detect_heads`.
        pattern: the keys on other prompts, by a name of `detect_heads(pattern=)`.
        on_prompts: what the score means on other prompts.
        also_known_as: what others call it.
        in_encoders: whether it has a meaning where queries see later keys.
    """

    name: str
    kind: str
    key: Callable[[int, int], int]
    target: str
    target_in_copy: str
    pattern: str
    on_prompts: str
    also_known_as: str
    in_encoders: bool = True

    @property
    def title(self) -> str:
        """What its heads are called, to begin a line with."""
        return self.kind.capitalize()


_ALL = (
    Detector(
        name="prev",
        kind="previous-token",
        key=lambda query, length: query - 1,
        target="the token before it",
        target_in_copy="the token before it",
        pattern="previous_token",
        on_prompts="Mean attention from each query to the token before it. NaN where no query counts.",
        also_known_as="previous-token score",
    ),
    Detector(
        name="dup",
        kind="duplicate-token",
        key=lambda query, length: query - length,
        target="the same token in the first copy",
        target_in_copy="the same token in the segment",
        pattern="duplicate",
        on_prompts="Mean attention to earlier tokens equal to the query's, where there are any; else NaN.",
        also_known_as="duplicate-token score",
    ),
    Detector(
        name="ind",
        kind="induction",
        key=lambda query, length: query - length + 1,
        target="the token after the same token in the first copy",
        target_in_copy="the token after the same one in the segment",
        pattern="induction",
        on_prompts="Mean attention to the tokens behind these, where there are any; else, and in an encoder, NaN.",
        also_known_as="induction score, prefix matching (Olsson et al. 2022)",
        in_encoders=False,  # what follows a token is seen there, not remembered
    ),
)
DETECTORS: Mapping[str, Detector] = MappingProxyType({one.name: one for one in _ALL})
"""The detectors by name, in the order of their columns."""

FRAMED = 0.3
"""The least score by which a picture of heads names a head after a detector."""


def framed_kind(scores: Mapping[Any, Any]) -> str:
    """Return the detector of a head's largest score if that is `FRAMED` or more, else an empty text; NaN is none."""
    found = {name: float(scores[name]) for name in DETECTORS if scores.get(name) is not None}
    return max((name for name in found if found[name] >= FRAMED), key=found.__getitem__, default="")
