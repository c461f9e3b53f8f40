"""The table of `replicate` as people read it: a row per sentence or number, with all that decides it in words."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from tlspectral_studies.fingerprint.replication.claims import DIFFERS, NEEDS_WEIGHTS, REPRODUCED
from tlspectral_studies.fingerprint.replication.sentences.sentence import DEPENDS, ROUNDING, UNDECIDED


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `replicate` in eleven columns of text, as `replication.csv` stores it.

    Args:
        table: of `replicate`.

    Returns:
        A row per sentence, ordered by verdict, then a row per number: those that differ, those that need weights,
        those that are reproduced. Columns: `kind` (sentence or number), `least_p` and `finds` (the least p that the
        rule of a sentence can give, and the smallest effect that it finds with probability .8; empty for numbers),
        `verdict`, `where` (paper and section), `what` (what a number is; empty for sentences), `published` (the
        sentence, or the number as printed), `here` (our number, four significant digits), `decided_by` (the reading
        that decides a sentence, or the function that computes a number), `other_readings` (what other choices give) and
        `why` (figures and reasons).
    """
    order = [("sentence", verdict) for verdict in table.attrs["sentences"]]
    order += [("number", verdict) for verdict in (DIFFERS, NEEDS_WEIGHTS, REPRODUCED)]
    rows = [
        _row(row)
        for kind, verdict in order
        for _, row in table[(table["kind"] == kind) & (table["verdict"] == verdict)].iterrows()
    ]
    return pd.DataFrame(rows)


def _row(row: Any) -> dict[str, str]:
    """Return the eleven texts of a row of `replicate`."""
    sentence = row["kind"] == "sentence"
    function = str(row["function"]).removeprefix("tlspectral_studies.fingerprint.replication.")
    return {
        "kind": row["kind"],
        "least_p": _least_p(row["least_p"]) if sentence else "",
        "finds": f"{row['smallest']:.2g} {row['effect']}" if row["effect"] else "",
        "verdict": row["verdict"],
        "where": row["where"],
        "what": "" if sentence else row["what"],
        "published": row["published"],
        "here": "" if sentence or pd.isna(row["ours"]) else f"{row['ours']:.4g}",
        "decided_by": deciding(row) if sentence else function,
        "other_readings": row["choices"],
        "why": row["why"],
    }


def counted(verdicts: Mapping[str, int]) -> str:
    """Return verdicts with their counts, in words: "10 holds, 2 holds to rounding"."""
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())


def deciding(row: Any) -> str:
    """Return the reading that decides a sentence: its condition, its number, and what a weaker reading gives up."""
    if row["verdict"] == UNDECIDED:
        nearest = f"; nearest: {_reading(row, 'weaker')}" if row["weaker"] else ""
        return f"not decided by what was published{nearest}"
    if not row["literal"]:
        return f"asked of others: {_reading(row, 'weaker')}"
    literal = _reading(row, "literal")
    if row["verdict"] == DEPENDS:
        return f"by {row['turned']}: {_nearest(row, literal)}"
    return _nearest(row, literal)


def _nearest(row: Any, literal: str) -> str:
    """Return the reading that decides by the readings that were taken."""
    if row["literal_holds"] or not row["weaker"]:
        return literal
    gives_up = "" if row["gives_up"] == ROUNDING else f" (gives up: {row['gives_up']})"
    if row["weaker_holds"]:
        return f"not literally: {literal}; but {_reading(row, 'weaker')}{gives_up}"
    return f"{literal}; nor {_reading(row, 'weaker')}"


def rule_finds(row: Any) -> str:
    """Return the least p that the rule of a sentence can give, and the smallest effect that it finds, in words."""
    finds = f"; finds {row['smallest']:.2g} {row['effect']} with probability .8" if row["effect"] else ""
    return f"least p: {_least_p(row['least_p'])}{finds}"


def _least_p(value: float) -> str:
    return "no sample" if pd.isna(value) else "< 1e-9" if value < 1e-9 else f"{value:.2g}"


def _reading(row: Any, name: str) -> str:
    return f"{row[name]}: {row[f'{name}_value']:.3g}"
