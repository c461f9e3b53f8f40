"""The detectors: which key each detector scores, and the texts of its columns.

To add a detector, add a record here. The head table, `detect_heads`, the comparison of two tables, edges and reports
all read these records.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Detector:
    """A detector score of a head: its mean attention from each query to one kind of key.

    Attributes:
        name: name of its column, such as "prev".
        kind: name for heads with a high score, such as "previous-token".
        key: function (query, L) that returns the position of the scored key. The sequence is [BOS, r, r], r has L
            tokens, and the query is in the second copy of r.
        target: the scored key in words, for the head table.
        target_in_copy: the scored key in words, for `detect_heads`.
        pattern: name of the same keys on other prompts, as in `detect_heads(pattern=)`.
        on_prompts: meaning of the score on other prompts.
        also_known_as: other names for the score.
        in_encoders: False if the score has no meaning in encoders, where queries see later keys.
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
        """The detector's `kind` with a capital letter, such as "Previous-token"."""
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
        on_prompts="Mean attention to earlier tokens equal to the query's token. NaN if no earlier token is equal.",
        also_known_as="duplicate-token score",
    ),
    Detector(
        name="ind",
        kind="induction",
        key=lambda query, length: query - length + 1,
        target="the token after the same token in the first copy",
        target_in_copy="the token after the same one in the segment",
        pattern="induction",
        on_prompts="Mean attention to the tokens that follow earlier tokens equal to the query's. NaN if no earlier "
        "token is equal, and in encoders.",
        also_known_as="induction score, prefix matching (Olsson et al. 2022)",
        in_encoders=False,  # an encoder sees the next token and need not recall it
    ),
)
DETECTORS: Mapping[str, Detector] = MappingProxyType({detector.name: detector for detector in _ALL})
"""The detectors by name, in the order of their columns."""

FRAMED = 0.3
"""Smallest score at which a picture of heads frames a head as a detector's."""


def framed_kind(scores: Mapping[Any, Any]) -> str:
    """Return the name of the detector with the largest score, such as "prev", or "" if no score reaches `FRAMED` (0.3).

    Pictures of heads draw a frame for this detector. `scores` is a row of a head table, a mapping with the detectors'
    names as keys. NaN counts as no score.
    """
    known = {name: float(scores[name]) for name in DETECTORS if scores.get(name) is not None}
    return max((name for name in known if known[name] >= FRAMED), key=known.__getitem__, default="")
