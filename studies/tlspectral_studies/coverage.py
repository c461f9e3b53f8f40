"""Every numbered item of the three papers and their quantities: the public name, the page, or why it is missing.

python -m tlspectral_studies.coverage   # prints the table of docs/from_the_papers.md
"""

from dataclasses import dataclass
from pathlib import Path

import typer

from tlspectral_studies.common.markdown_table import markdown_table

NUMBERED = {
    "FP": {"Table": 4, "Figure": 5, "equation": 5},
    "PS": {"Definition": 2, "Theorem": 8, "Lemma": 6, "Corollary": 1, "Figure": 12},
    "BA": {"equation": 2, "Table": 1, "Figure": 5},
}
"""How many items of each kind a paper numbers; a test finds each of them in `ITEMS`."""

MISSING = "missing"


@dataclass(frozen=True)
class Item:
    """A definition, lemma, table, figure or quantity of a paper.

    Attributes:
        paper: FP, PS or BA.
        what: the item, with its number.
        names: public names, in code spans; empty if it is missing.
        page: link to the page with its result or its use; empty if it is missing.
        note: what to know, or why it is missing.
    """

    paper: str
    what: str
    names: str
    page: str
    note: str = ""


def _items() -> tuple[Item, ...]:
    """Return the rows of coverage.txt: five cells between bars, the last of which may be empty."""
    lines = (Path(__file__).parent / "coverage.txt").read_text(encoding="utf-8").splitlines()
    return tuple(Item(*(cell.strip() for cell in line.split("|"))) for line in lines)


ITEMS = _items()
"""The rows of the table, in the order of the papers."""


def coverage_table() -> str:
    """Return the table of `docs/from_the_papers.md` as Markdown."""
    rows = [[item.paper, item.what, item.names, item.page, item.note] for item in ITEMS]
    return "\n".join(markdown_table(["paper", "what", "here", "page", "note"], rows)[:-1])


if __name__ == "__main__":
    typer.echo(coverage_table())
