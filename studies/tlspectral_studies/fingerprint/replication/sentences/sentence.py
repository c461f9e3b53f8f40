"""A claim in words, and its verdict by its own words, or by a weaker claim that says what it gives up."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from jaxtyping import Bool

HOLDS = "holds"
ROUNDED = "holds to rounding"
WEAKENED = "holds weakened"
CONTRADICTED = "contradicted"
UNDECIDED = "not decidable"
SENTENCE_VERDICTS = (HOLDS, ROUNDED, WEAKENED, CONTRADICTED, UNDECIDED)

ROUNDING = "digits behind the printed ones"
"""What a reading gives up that holds to rounding."""

LEVEL = 0.05
"""Level of every test, over its family by Holm's procedure."""


@dataclass(frozen=True)
class Reading:
    """What a reading of a sentence asks for, and whether the tables have it.

    Attributes:
        asks: the condition, with what `value` is.
        value: the number that decides.
        holds: whether the condition is met; False where a number that it compares is NaN.
        gives_up: what of the sentence a weaker reading leaves out; empty for its own words.
    """

    asks: str
    value: float
    holds: bool
    gives_up: str = ""

    @classmethod
    def every(cls, asks: str, met: pd.Series | Bool[np.ndarray, "units"], gives_up: str = "") -> "Reading":
        """A reading by which all units meet a condition; `value` is how many do."""
        return cls(asks, float(met.sum()), bool(met.all()), gives_up)


@dataclass(frozen=True)
class Sentence:
    """A sentence of a paper, read by its own words and, where these fail, by a weaker claim.

    Attributes:
        id: name of the row, unique.
        where: paper and section.
        says: the sentence, quoted in short.
        tested: what is compared, and the family of tests where there are several.
        n: units of the test: heads of the smallest model, models, runs, or checkpoints.
        power: what the test could have seen at this n.
        literal: the words as they stand; None where the tables do not hold what they are about.
        weaker: a claim with the sentence's own verb and less scope or precision; None where there is none that holds
            or fails by itself. Beside a literal reading of None it is the nearest that the tables hold.
        remark: the figures behind the readings; what is needed where the literal reading is None.
        function: what decides it; empty for the function that returned the sentence.
    """

    id: str
    where: str
    says: str
    tested: str
    n: int
    power: str
    literal: Reading | None
    weaker: Reading | None
    remark: str
    function: str = ""

    @property
    def verdict(self) -> str:
        """One of `SENTENCE_VERDICTS`; contradicted is what fails by its own words and by the weaker claim, if any."""
        if self.literal is None:
            return UNDECIDED
        if self.literal.holds:
            return HOLDS
        if self.weaker is None or not self.weaker.holds:
            return CONTRADICTED
        return ROUNDED if self.weaker.gives_up == ROUNDING else WEAKENED
