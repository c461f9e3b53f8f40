"""The table of `replicate` as Markdown: sentences with both readings, verdicts on numbers, what differs or is open."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import pandas as pd

from tlspectral.studies.fingerprint.replication.claims import VERDICTS


def markdown(table: pd.DataFrame) -> str:
    """Write the table of `replicate` as Markdown: sentences, verdicts by section, what differs, what needs weights.

    Args:
        table: of `replicate`.

    Returns:
        Four Markdown tables under headings.
    """
    sentences, numbers = (table.loc[table["kind"] == kind] for kind in ("sentence", "number"))
    said = [
        (
            row["where"],
            f'"{row["published"]}"',
            reading(row, "strict"),
            reading(row, "kindest"),
            row["verdict"],
            f"{row['what']}; n = {row['n']}; power: {row['power']}. {row['why']}",
        )
        for _, row in sentences.iterrows()
    ]
    section = numbers["where"].str.split(" and ").str[0]
    counts = pd.crosstab(section, numbers["verdict"]).reindex(
        index=pd.unique(section), columns=list(VERDICTS), fill_value=0
    )
    by_section = [(where, *map(str, row)) for where, row in zip(counts.index, counts.to_numpy(), strict=True)]
    differs, unchecked = (numbers.loc[numbers["verdict"] == verdict] for verdict in VERDICTS[1:])
    differing = [
        (row["where"], row["what"], row["published"], f"{row['ours']:.4g}", row["why"]) for _, row in differs.iterrows()
    ]
    of_weights = [
        (row["where"], row["what"], row["published"], f"`{row['function']}`") for _, row in unchecked.iterrows()
    ]
    headings = ("where", "sentence", "strictest reading", "kindest reading", "verdict", "why")
    lines = ["### Sentences", "", *markdown_table(headings, said)]
    lines += ["### Verdicts on numbers", "", *markdown_table(("where", *VERDICTS), by_section)]
    lines += ["### What differs", "", *markdown_table(("where", "what", "printed", "here", "why"), differing)]
    lines += ["### What needs weights", "", *markdown_table(("where", "what", "printed", "measured by"), of_weights)]
    return "\n".join(lines)


def reading(row: Mapping[Hashable, Any] | pd.Series, name: str) -> str:
    """One reading of a sentence in words: whether it holds, what it asks for, the number that decides."""
    asks: Any = row[name]
    holds: Any = row[f"{name}_holds"]
    if not asks:
        return "the tables hold nothing for it"
    return f"{'yes' if holds else 'no'}: {asks}: {row[f'{name}_value']:.3g}"


def markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table, and an empty one behind it; bars and tildes in cells are escaped."""
    names = list(header)
    return [_row(names), "|---" * len(names) + "|", *map(_row, rows), ""]


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("~", "\\~") for cell in cells) + " |"
