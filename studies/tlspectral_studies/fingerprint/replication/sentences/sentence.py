"""A claim in words, and its verdict: by its own words, by a weaker claim, or not at all, and then for what reason."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from jaxtyping import Bool

HOLDS = "holds"
ROUNDED = "holds to rounding"
WEAKENED = "holds weakened"
DEPENDS = "depends on a choice"
OPEN = "open"
POWERLESS = "no power"
ELSEWHERE = "asked of another population"
CONTRADICTED = "contradicted"
UNDECIDED = "not decidable"
SENTENCE_VERDICTS = (HOLDS, ROUNDED, WEAKENED, DEPENDS, OPEN, POWERLESS, ELSEWHERE, CONTRADICTED, UNDECIDED)

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
class Power:
    """What the rule of a sentence could have found.

    Attributes:
        said: the same in words.
        least_p: the least p that the rule can give, after the correction for its family; NaN where nothing is sampled,
            so that one case refutes or shows it.
        smallest: the smallest effect that it finds with probability .8; infinite if it finds none.
        effect: what `smallest` is, with its unit.
    """

    said: str
    least_p: float = math.nan
    smallest: float = math.nan
    effect: str = ""


@dataclass(frozen=True)
class Choice:
    """Another reading of the same tables, as good as the one that was taken.

    Attributes:
        of: what is chosen: a level, a window, the layers, an estimator, a family of tests or another criterion.
        taken: what the sentence's readings take.
        other: the reading with the other choice.
    """

    of: str
    taken: str
    other: Reading


@dataclass(frozen=True)
class Population:
    """Of whom a sentence speaks, and of whom it was asked: names of models, histories or runs."""

    said_of: frozenset[str]
    asked_of: frozenset[str]

    @classmethod
    def of(cls, said_of: Iterable[object], asked_of: Iterable[object]) -> "Population":
        """Take the names from the keys of tables."""
        return cls(frozenset(map(str, said_of)), frozenset(map(str, asked_of)))

    @property
    def is_another(self) -> bool:
        """Whether none of those that were asked is spoken of."""
        return not self.said_of & self.asked_of


@dataclass(frozen=True)
class Sentence:
    """A sentence of a paper, read by its own words and, where these fail, by a weaker claim.

    Attributes:
        id: name of the row, unique.
        where: paper and section.
        says: the sentence, quoted in short.
        tested: what is compared, and the family of tests where there are several.
        n: units of the test: heads of the smallest model, models, runs, or checkpoints.
        power: what the rule could have found at this n.
        literal: the words as they stand; None where the tables do not hold what they are about.
        weaker: a claim with the sentence's own verb and less scope or precision; None where there is none that holds
            or fails by itself. Beside a literal reading of None it is the nearest that the tables hold.
        remark: the figures behind the readings; what is needed where the literal reading is None.
        function: what decides it; empty for the function that returned the sentence.
        choices: other readings of the same tables; levels that a paper does not give are tried at half and double.
        population: of whom it speaks and was asked; None where these are the same.
        within: of a claim that something is absent, whether the interval excludes what would matter; None for others.
    """

    id: str
    where: str
    says: str
    tested: str
    n: int
    power: Power
    literal: Reading | None
    weaker: Reading | None
    remark: str
    function: str = ""
    choices: tuple[Choice, ...] = field(default=())
    population: Population | None = None
    within: bool | None = None

    @property
    def holds(self) -> bool:
        """Whether its own words or the weaker claim hold."""
        return any(reading is not None and reading.holds for reading in (self.literal, self.weaker))

    @property
    def turned(self) -> tuple[Choice, ...]:
        """The choices with which the answer is the other one."""
        return tuple(choice for choice in self.choices if choice.other.holds != self.holds)

    @property
    def verdict(self) -> str:
        """One of `SENTENCE_VERDICTS`, the first that applies.

        Asked of another population. Not decidable: no table has what its words need. No power: the rule gives no p
        that is significant. Depends on a choice: another reading gives the other answer. Open: something is claimed
        not to be there, it was not found, and could be there. Holds, to rounding or weakened; else contradicted.
        """
        if self.population is not None and self.population.is_another:
            return ELSEWHERE
        if self.literal is None:
            return UNDECIDED
        if self.power.least_p > LEVEL:
            return POWERLESS
        if self.turned:
            return DEPENDS
        if self.within is False and self.holds:
            return OPEN
        if self.literal.holds:
            return HOLDS
        if self.weaker is None or not self.weaker.holds:
            return CONTRADICTED
        return ROUNDED if self.weaker.gives_up == ROUNDING else WEAKENED
