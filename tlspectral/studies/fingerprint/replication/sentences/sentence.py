"""A claim in words, and its verdict from the strictest and the kindest reading of it."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool

HOLDS = "holds"
KINDLY = "holds only kindly"
FAILS = "does not hold"
UNDECIDED = "not decidable from the tables"
SENTENCE_VERDICTS = (HOLDS, KINDLY, FAILS, UNDECIDED)

LEVEL = 0.05
"""Level of every test, over its family by Holm's procedure."""


@dataclass(frozen=True)
class Reading:
    """What a reading of a sentence asks for, and whether the tables have it.

    Attributes:
        asks: the condition, with what `value` is.
        value: the number that decides.
        holds: whether the condition is met; False where a number that it compares is NaN.
    """

    asks: str
    value: float
    holds: bool

    @classmethod
    def every(cls, asks: str, met: pd.Series | Bool[np.ndarray, "units"]) -> "Reading":
        """A reading by which all units meet a condition; `value` is how many do."""
        return cls(asks, float(met.sum()), bool(met.all()))


@dataclass(frozen=True)
class Sentence:
    """A sentence of a paper and two readings of it.

    Attributes:
        id: name of the row, unique.
        where: paper and section.
        says: the sentence, quoted in short.
        tested: what is compared, and the family of tests where there are several.
        n: units of the test: heads of the smallest model, models, runs, or checkpoints.
        power: what the test could have seen at this n.
        strict: the words as they stand; None where the tables do not hold what they are about.
        kindest: the weakest claim that the words can still mean. None where the tables hold nothing about the sentence.
        remark: the figures behind the readings; what is needed where the strict reading is None.
        function: what decides it; empty for the function that returned the sentence.
    """

    id: str
    where: str
    says: str
    tested: str
    n: int
    power: str
    strict: Reading | None
    kindest: Reading | None
    remark: str
    function: str = ""

    @property
    def verdict(self) -> str:
        """`holds` as it stands, `holds only kindly`, `does not hold` in either reading, or `not decidable ...`."""
        if self.strict is None:
            return UNDECIDED
        if self.strict.holds:
            return HOLDS
        return KINDLY if self.kindest is not None and self.kindest.holds else FAILS
