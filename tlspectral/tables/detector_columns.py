"""The detectors: which key each detector scores, and the texts of its columns.

To add a detector, add a record here. The head table, `detect_heads`, the comparison of two tables, edges and reports
all read these records.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


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


_FALSE = 0.05  # probability that a head at chance is called above chance, over all heads of a table


def detector_chance(heads: "pd.DataFrame", name: str) -> float | dict[str, float] | None:
    """Return the chance level of the detector `name`, such as "prev", to six digits: an attention probability, a dict
    by layer ("L3") if attention windows differ, or None if the table does not record it.
    """
    detectors = heads.attrs.get("detectors")
    chance = detectors.get("chance") if isinstance(detectors, dict) else None
    chance = chance.get(name) if isinstance(chance, dict) else chance
    if isinstance(chance, dict):
        return {layer: float(f"{level:.6g}") for layer, level in chance.items() if level is not None}
    return float(f"{chance:.6g}") if isinstance(chance, (int, float)) else None


def heads_above_chance(heads: "pd.DataFrame", name: str, top: int) -> "pd.DataFrame | None":
    """Return the rows of at most `top` heads with the highest score of the detector `name`, without heads that are not
    above chance; None if the table has no such score.

    A head is above chance if its score less z standard errors exceeds the chance level of its layer. z is the normal
    quantile of 1 - .05 / n for n heads, because the largest of n scores is looked at. A score without a standard error
    is compared as it is. Where the table records no chance level, all heads count as above it.
    """
    scored = heads.dropna(subset=[name]) if name in heads else heads.iloc[:0]
    if scored.empty:
        return None
    chance = detector_chance(heads, name)
    if chance is not None:
        levels = [chance.get(f"L{layer}", -1.0) if isinstance(chance, dict) else chance for layer in scored["layer"]]
        errors = scored[f"{name}_se"].fillna(0.0) if f"{name}_se" in scored else 0.0
        scored = scored.loc[scored[name] - NormalDist().inv_cdf(1 - _FALSE / len(scored)) * errors > levels]
    return scored.nlargest(top, name)
