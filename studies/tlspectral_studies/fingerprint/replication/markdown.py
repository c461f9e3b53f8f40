"""The table of `replicate` as Markdown: sentences with what decides them, numbers that differ or that need weights."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from tlspectral_studies.common.markdown_table import markdown_table
from tlspectral_studies.fingerprint.replication.claims import DIFFERS, NEEDS_WEIGHTS
from tlspectral_studies.fingerprint.replication.sentences.sentence import HOLDS, ROUNDED, UNDECIDED


def markdown(table: pd.DataFrame) -> str:
    """Write the table of `replicate` as Markdown: sentences by verdict, numbers that differ, numbers that need weights.

    Args:
        table: of `replicate`.

    Returns:
        A page: three Markdown tables under headings with their counts.
    """
    sentences, numbers = (table.loc[table["kind"] == kind] for kind in ("sentence", "number"))
    lines = [
        "# Every published sentence, and the numbers that differ",
        "",
        "`tlspectral study replicate -o FOLDER` writes this page. The rule, and what it leaves out: "
        "[replication](replication.md).",
        "",
        f"## {len(sentences)} sentences: {counted(table.attrs['sentences'])}",
        "",
    ]
    said = [
        (row["where"], f'"{row["published"]}"', row["verdict"], deciding(row), row["why"])
        for verdict in table.attrs["sentences"]
        for _, row in sentences.loc[sentences["verdict"] == verdict].iterrows()
    ]
    lines += markdown_table(("where", "sentence", "verdict", "decided by", "figures"), said)
    differs, unchecked = (numbers.loc[numbers["verdict"] == verdict] for verdict in (DIFFERS, NEEDS_WEIGHTS))
    differing = [
        (row["where"], row["what"], row["published"], f"{row['ours']:.4g}", row["why"]) for _, row in differs.iterrows()
    ]
    lines += [f"## {len(numbers)} numbers: {counted(table.attrs['verdicts'])}", ""]
    lines += markdown_table(("where", "what", "printed", "here", "why"), differing)
    lines += ["## What needs weights", ""]
    of_weights = [
        (
            str(function).removeprefix("tlspectral."),
            "; ".join(f"{row['what']} {row['published']}" for _, row in of_it.iterrows()),
        )
        for function, of_it in unchecked.groupby("function", sort=False)
    ]
    return "\n".join([*lines, *markdown_table(("measured by", "printed"), of_weights)])


def counted(verdicts: Mapping[str, int]) -> str:
    """Verdicts with their counts, in words."""
    return ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())


def deciding(row: Any) -> str:
    """The reading that decides a sentence in words: what it asks for, its number, and what a weaker one gives up."""
    if row["verdict"] == UNDECIDED:
        nearest = f"; nearest: {_reading(row, 'weaker')}" if row["weaker"] else ""
        return f"not decided by what was published{nearest}"
    literal = _reading(row, "literal")
    if row["verdict"] == HOLDS or not row["weaker"]:
        return literal
    gives_up = "" if row["verdict"] == ROUNDED else f" (gives up: {row['gives_up']})"
    if row["weaker_holds"]:
        return f"not literally: {literal}; but {_reading(row, 'weaker')}{gives_up}"
    return f"{literal}; nor {_reading(row, 'weaker')}"


def _reading(row: Any, name: str) -> str:
    return f"{row[name]}: {row[f'{name}_value']:.3g}"
