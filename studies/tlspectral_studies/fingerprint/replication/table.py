"""Every published number beside ours, and every sentence with its verdict, in one table."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

import pandas as pd

from tlspectral.tables.schema import Schema, columns
from tlspectral_studies.fingerprint.published import LICENCE, SOURCE
from tlspectral_studies.fingerprint.replication import (
    causal_anatomy,
    constrained_training,
    exact_heads,
    head_function,
    matched_null,
    phase_ablation,
    phase_attenuation,
    positional_schemes,
    strong_heads,
    training_history,
)
from tlspectral_studies.fingerprint.replication import sentences as said
from tlspectral_studies.fingerprint.replication.claims import MONTE_CARLO_TOLERANCE, VERDICTS, Claim, PublishedTables
from tlspectral_studies.fingerprint.replication.sentences import SENTENCE_VERDICTS, Choice, Sentence

_SECTIONS = (
    matched_null,
    head_function,
    causal_anatomy,
    positional_schemes,
    strong_heads,
    phase_attenuation,
    phase_ablation,
    training_history,
    constrained_training,
    exact_heads,
)
_PAPERS = (
    said.head_function,
    said.ablations,
    said.positions,
    said.phase,
    said.history,
    said.constrained,
    said.formation_order,
    said.positional_symbolic,
    said.bifocal,
)


def _yielding(kind: type, modules: Iterable[ModuleType]) -> tuple[Callable[[PublishedTables], Iterable[Any]], ...]:
    """The functions that yield rows of a kind, in the order in which they stand in their modules."""
    return tuple(
        function
        for module in modules
        for function in vars(module).values()
        if getattr(function, "__module__", "") == module.__name__
        and getattr(function, "__annotations__", {}).get("return") == Iterator[kind]
    )


RECOMPUTED = _yielding(Claim, _SECTIONS)
"""The functions that yield claims."""

DECIDED = _yielding(Sentence, _PAPERS)
"""The functions of sentences; each takes the tables and yields its sentences."""

NUMBER, SENTENCE = "number", "sentence"
REPLICATE = Schema(
    "replicate",
    columns("""
        id            | label          | Name of the row.
        kind          | label          | number: a published one, recomputed. sentence: a claim in words.
        where         | text           | Paper, and section, table or figure.
        what          | text           | What the number is; of a sentence what is tested, with the family of tests.
        published     | text           | A number as printed, or with <, <=, >, >= or ~ in front; a sentence as quoted.
        ours          | of the number  | The number recomputed. NaN where the tables do not suffice, and for sentences.
        difference    | of the number  | ours less the published number. NaN for bounds and sentences.
        verdict       | label          | Of a number: reproduced, if it rounds to the printed digits, an approximate one
                      |                | within one unit of the last, a Monte-Carlo one within 0.01, a bound where it
                      |                | holds; else differs; or cannot be checked without weights. Of a sentence: holds
                      |                | by its own words; holds to rounding; holds weakened, gives_up being the
                      |                | weakening; depends on a choice; open: claimed to be absent, not found, and not
                      |                | excluded; no power: least_p is above 0.05; asked of another population;
                      |                | contradicted; or not decidable from the tables.
        why           | text           | Why a number differs, by how much one misses its literal reading, what weights
                      |                | are needed for; the figures behind a sentence, or what it needs.
        function      | label          | Function that recomputes or measures the number, or decides the sentence.
        seed          | index          | Seed of a Monte-Carlo number; missing for others.
        n             | count          | Units of the test of a sentence: heads of the smallest model, models, runs,
                      |                | steps.
        power         | text           | What the rule of a sentence could have found at this n.
        least_p       | probability    | The least p that the rule can give, after the correction for its family; NaN
                      |                | where nothing is sampled.
        smallest      | of effect      | Smallest effect that the rule finds with probability 0.8; infinite for none.
        effect        | text           | What smallest is, with its unit.
        choices       | text           | What the other readings of the same tables give, each with what is chosen.
        turned        | text           | What is chosen in those readings that give the other answer.
        literal       | text           | What a sentence asks for by its own words.
        literal_value | of the reading | The number that decides it.
        literal_holds | flag           | Whether its condition is met.
        weaker        | text           | The same for a weaker claim with the same verb, where there is one.
        weaker_value  | of the reading | The number that decides it.
        weaker_holds  | flag           | Whether its condition is met.
        gives_up      | text           | What of the sentence the weaker claim leaves out.
    """),
    "`replicate` of `tlspectral_studies.fingerprint.replication`; `tlspectral study replicate -o FOLDER` writes it as "
    "replication.parquet",
)
COLUMNS = tuple(column.name for column in REPLICATE.columns)
_TYPES = {
    **dict.fromkeys(("ours", "difference", "literal_value", "weaker_value", "least_p", "smallest"), "float64"),
    **dict.fromkeys(("seed", "n"), "Int64"),
    **dict.fromkeys(("literal_holds", "weaker_holds"), "boolean"),
}
_Row = TypeVar("_Row", Claim, Sentence)


def replicate(tables: PublishedTables | None = None) -> pd.DataFrame:
    """Recompute the published numbers of "Fingerprint, Not Blueprint" (FP) and the exact heads of PS; decide sentences.

    Args:
        tables: other tables in place of the published ones, to see what a row depends on.

    Returns:
        DataFrame, a number or a sentence a row, numbers first. Columns: `id, kind, where, what, published, ours,
        difference, verdict, why, function, seed, n, power, least_p, smallest, effect, choices, turned, literal,
        literal_value, literal_holds, weaker, weaker_value, weaker_holds, gives_up`. Those of the other kind are empty.
        `attrs["verdicts"]` counts the verdicts of numbers, `attrs["sentences"]` of sentences.

    What it does not establish: that the tables are what the models are. It goes from published tables to published
    numbers and sentences; a number from weights (`analyze_heads`) is a further step. Readings are ours, and were
    written with the tables at hand: a sentence can be meant otherwise.
    """
    tables = PublishedTables() if tables is None else tables
    rows = [_of_claim(claim) for claim in _rows(RECOMPUTED, tables)]
    rows += [_of_sentence(sentence) for sentence in _rows(DECIDED, tables)]
    table = pd.DataFrame(rows, columns=list(COLUMNS)).astype(_TYPES)
    texts = ["power", "effect", "choices", "turned", "literal", "weaker", "gives_up"]
    table[texts] = table[texts].fillna("")
    attrs = {
        "source": SOURCE,
        "licence": LICENCE,
        "monte_carlo_tolerance": MONTE_CARLO_TOLERANCE,
        "verdicts": _counted(table, NUMBER, VERDICTS),
        "sentences": _counted(table, SENTENCE, SENTENCE_VERDICTS),
    }
    return REPLICATE.frame(table, attrs)


def _rows(functions: tuple[Callable[[PublishedTables], Iterable[_Row]], ...], tables: PublishedTables) -> list[_Row]:
    """Rows of all functions, each with the name of the function that it does not name itself."""
    return [
        replace(row, function=row.function or f"{decide.__module__}.{decide.__qualname__}")
        for decide in functions
        for row in decide(tables)
    ]


def _of_claim(claim: Claim) -> dict[str, object]:
    row: dict[str, object] = {name: getattr(claim, name) for name in COLUMNS if hasattr(claim, name)}
    return row | {"kind": NUMBER}


def _of_sentence(sentence: Sentence) -> dict[str, object]:
    row: dict[str, object] = {
        "kind": SENTENCE,
        "what": sentence.tested,
        "published": sentence.says,
        "why": sentence.remark,
        **{name: getattr(sentence, name) for name in ("id", "where", "verdict", "function", "n")},
        **{name: getattr(sentence.power, name) for name in ("least_p", "smallest", "effect")},
        "power": sentence.power.said,
        "choices": "; ".join(map(_in_words, sentence.choices)),
        "turned": ", ".join(dict.fromkeys(choice.of for choice in sentence.turned)),
    }
    for name, reading in (("literal", sentence.literal), ("weaker", sentence.weaker)):
        if reading is not None:
            row |= {name: reading.asks, f"{name}_value": reading.value, f"{name}_holds": reading.holds}
            row["gives_up"] = reading.gives_up
    return row


def _in_words(choice: Choice) -> str:
    """Return what another reading gives: "layers, not heads as independent: ASKS: 19, not so"."""
    other = choice.other
    return f"{choice.of}, not {choice.taken}: {other.asks}: {other.value:.3g}, {'so' if other.holds else 'not so'}"


def _counted(table: pd.DataFrame, kind: str, verdicts: tuple[str, ...]) -> dict[str, int]:
    of_kind = table.loc[table["kind"] == kind, "verdict"]
    return {verdict: int((of_kind == verdict).sum()) for verdict in verdicts}
