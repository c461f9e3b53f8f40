"""The table of `replicate` as Markdown: sentences with both readings, verdicts on numbers, what differs or is open."""

from collections.abc import Hashable, Mapping
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
    lines = [
        "### Sentences",
        "",
        *_header("where", "sentence", "strictest reading", "kindest reading", "verdict", "why"),
    ]
    lines += [
        _row(
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
    lines += ["", "### Verdicts on numbers", "", *_header("where", *VERDICTS)]
    lines += [
        _row(where, *map(str, of_verdict)) for where, of_verdict in zip(counts.index, counts.to_numpy(), strict=True)
    ]
    differs, unchecked = (numbers.loc[numbers["verdict"] == verdict] for verdict in VERDICTS[1:])
    lines += ["", "### What differs", "", *_header("where", "what", "printed", "here", "why")]
    for where, what, published, ours, why in zip(
        *(differs[name] for name in ("where", "what", "published", "ours", "why")), strict=True
    ):
        lines.append(_row(where, what, published, f"{ours:.4g}", why))
    lines += ["", "### What needs weights", "", *_header("where", "what", "printed", "measured by")]
    for row in zip(*(unchecked[name] for name in ("where", "what", "published", "function")), strict=True):
        lines.append(_row(*row[:3], f"`{row[3]}`"))
    return "\n".join([*lines, ""])


def reading(row: Mapping[Hashable, Any] | pd.Series, name: str) -> str:
    """One reading of a sentence in words: whether it holds, what it asks for, the number that decides."""
    asks: Any = row[name]
    holds: Any = row[f"{name}_holds"]
    if not asks:
        return "the tables hold nothing for it"
    return f"{'yes' if holds else 'no'}: {asks}: {row[f'{name}_value']:.3g}"


def _header(*names: str) -> list[str]:
    return [_row(*names), "|---" * len(names) + "|"]


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("~", "\\~") for cell in cells) + " |"
