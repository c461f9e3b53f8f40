"""A published number beside ours, and the rule by which the two agree or differ."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from tlspectral.tables.measurement import stacked
from tlspectral_studies.fingerprint.published import (
    PUBLISHED_CHECKPOINTS,
    PUBLISHED_HEADS,
    ConstrainedTables,
    published_checkpoints,
    published_constrained,
    published_heads,
    published_kernels,
)
from tlspectral_studies.fingerprint.statistics import spearman_table

REPRODUCED = "reproduced"
DIFFERS = "differs"
NEEDS_WEIGHTS = "cannot be checked without weights"
VERDICTS = (REPRODUCED, DIFFERS, NEEDS_WEIGHTS)

MONTE_CARLO_TOLERANCE = 0.01
"""For endpoints of bootstrap intervals: an endpoint of 2000 draws moves by .002 to .009 (one sd) between seeds."""

_PUBLISHED = re.compile(
    r"(?P<relation><=|>=|<|>|~)?\s*(?P<number>[+-]?\d+(?:\.(?P<decimals>\d+))?(?:e(?P<power>[+-]?\d+))?)"
)


@dataclass(frozen=True)
class Claim:
    """One published number and the same number recomputed from the published tables.

    Attributes:
        id: name of the row, unique.
        where: paper and section, table or figure.
        what: what the number is.
        published: as printed, or what a sentence says, as a number: `+0.47`, `2.5e-5`; as a bound: `<= 0.02`, `> 0.05`
            for a p-value called not significant; approximate where the text says so: `~0.61`.
        ours: recomputed; None where the tables do not suffice.
        if_differs: why it differs, where that is known.
        remark: added to `why` whatever the verdict.
        seed: of a Monte-Carlo number, which may differ by `MONTE_CARLO_TOLERANCE`.
        function: what recomputes it; empty for the function that returned the claim.
    """

    id: str
    where: str
    what: str
    published: str
    ours: float | None
    if_differs: str = ""
    remark: str = ""
    seed: int | None = None
    function: str = ""

    @property
    def number(self) -> float:
        """The published number, or the bound."""
        return float(_parsed(self.published)["number"])

    @property
    def difference(self) -> float:
        """Ours less the published number; NaN for bounds and where there is no number of ours."""
        bound = _parsed(self.published)["relation"]
        return math.nan if self.ours is None or bound not in (None, "~") else self.ours - self.number

    @property
    def verdict(self) -> str:
        """`reproduced`, `differs` or `cannot be checked without weights`.

        A number is reproduced where it rounds to the printed digits; an approximate one within one unit of the last
        printed digit; a Monte-Carlo one within its tolerance; a bound where it holds, for `<=` and `>=` up to the
        rounding of the printed digits. NaN reproduces nothing.
        """
        if self.ours is None:
            return NEEDS_WEIGHTS
        return REPRODUCED if self._agrees(self.ours) else DIFFERS

    @property
    def why(self) -> str:
        """Why it differs, what has to be known about a number that does not, or what weights are needed for."""
        reasons = [self.remark]
        if self.verdict == DIFFERS:
            reasons.insert(0, self.if_differs or f"the tables give {self.ours:.4g}; the reason is not known")
        elif self.verdict == REPRODUCED:
            reasons.insert(0, self._leniency)
        return "; ".join(text for text in reasons if text)

    @property
    def _leniency(self) -> str:
        """By how much a reproduced number misses the literal reading; empty where it does not."""
        assert self.ours is not None
        relation = _parsed(self.published)["relation"]
        off = self.ours - self.number
        half_digit = 0.5 * _unit(self.published)
        slack = 1e-9 * half_digit
        if (relation == "<=" and off > slack) or (relation == ">=" and -off > slack):
            side = "above" if off > 0 else "below"
            return f"literally not: {abs(off):.2g} {side} the bound, within the rounding of its digits"
        if relation in (None, "~") and abs(off) > half_digit + slack:
            allowed = "one unit of an approximate number" if self.seed is None else "the Monte-Carlo tolerance"
            return f"literally not: {off:+.2g} from the printed number, within {allowed}"
        return ""

    def _agrees(self, ours: float) -> bool:
        relation, published = _parsed(self.published)["relation"], self.number
        half_digit = 0.5 * _unit(self.published)
        slack = 1e-9 * half_digit
        if relation == "<":
            return ours < published
        if relation == ">":
            return ours > published
        if relation == "<=":
            return ours <= published + half_digit + slack
        if relation == ">=":
            return ours >= published - half_digit - slack
        allowed = 2 * half_digit if relation == "~" else half_digit
        return abs(ours - published) <= (allowed if self.seed is None else MONTE_CARLO_TOLERANCE) + slack


@dataclass(frozen=True, eq=False)
class PublishedTables:
    """All published tables, as `replicate` takes them.

    Attributes:
        heads: table of heads by model.
        checkpoints: history by model.
        kernels: of `published_kernels`.
        constrained: of `published_constrained`, strength 10.
        weak: the same of strength 1.
    """

    heads: dict[str, pd.DataFrame] = field(
        default_factory=lambda: {name: published_heads(name) for name in PUBLISHED_HEADS}
    )
    checkpoints: dict[str, pd.DataFrame] = field(
        default_factory=lambda: {name: published_checkpoints(name) for name in PUBLISHED_CHECKPOINTS}
    )
    kernels: pd.DataFrame = field(default_factory=published_kernels)
    constrained: ConstrainedTables = field(default_factory=published_constrained)
    weak: ConstrainedTables = field(default_factory=partial(published_constrained, 1.0))

    def sizes(self, names: Iterable[str] | None = None) -> dict[str, int]:
        """Numbers of heads by model, of all models or of some."""
        return {name: len(self.heads[name]) for name in (self.heads if names is None else names)}

    def correlations(
        self, names: Iterable[str], columns: Sequence[str] | str, against: Sequence[str] | str
    ) -> pd.DataFrame:
        """`spearman_table` of several models below one another, with a column `model`."""
        return stacked(spearman_table(self.heads[name], columns, against).assign(model=name) for name in names)


def value_at(table: pd.DataFrame | pd.Series, *key: Any) -> float:
    """Number in one cell of a table, by row and column, or of a Series, by its label."""
    cell: Any = table.loc[key[0] if len(key) == 1 else key]
    return float(cell)


def needs_weights(
    claim: str, where: str, what: str, published: str, function: str, remark: str = "not in the published tables"
) -> Claim:
    """Claim about a number that the published tables do not hold, with the function that measures it on a model."""
    return Claim(claim, where, what, published, None, remark=remark, function=function)


def _parsed(published: str) -> re.Match[str]:
    match = _PUBLISHED.fullmatch(published.strip())
    if match is None:
        raise ValueError(f"{published!r} is not a published number: give it as +0.47, 2.5e-5 or <= 0.02")
    return match


def _unit(published: str) -> float:
    """Value of one unit in the last printed digit."""
    parts = _parsed(published)
    return 10.0 ** (int(parts["power"] or 0) - len(parts["decimals"] or ""))
