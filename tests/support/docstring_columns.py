"""The lists of columns in docstrings, "Columns: `layer, head`.", beside the schemas of their tables.

`make docstrings` writes the schemas' lists into the sources. A function whose table has another name, or that returns
several, names what it lists: "Columns of `head_history.summary`: `step, value`.". A list with `?` explains it:
"Columns (`?`: not in every table): `layer, head?`.".
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tlspectral.tables.every_table import every_schema

PACKAGE = Path(__file__).parents[2] / "tlspectral"
SCHEMAS = every_schema()
WIDTH = 120
_LIST = re.compile(r"Columns(?: of `([\w.-]+)`)?(?:\s+\(`\?`:\s+not\s+in\s+every\s+table\))?:\s+`([^`]*)`")


def listed(table: str) -> str:
    """The columns of a table as a docstring lists them; `?` behind those that are not always there."""
    return ", ".join(column.name + "?" * (not column.always) for column in SCHEMAS[table].columns)


def docstrings(source: str) -> Iterator[tuple[str, ast.Constant]]:
    """Names of functions and classes in the source, and their docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            assert isinstance(node.body[0], ast.Expr)
            assert isinstance(node.body[0].value, ast.Constant)
            yield node.name, node.body[0].value


def lists(name: str, text: str) -> dict[str, str]:
    """What the docstring of a function lists, by table."""
    return {found[1] or name: " ".join(found[2].split()) for found in _LIST.finditer(text)}


def rewritten(source: str) -> str:
    """The source with the schemas' lists; paragraphs that held other lists are wrapped anew."""
    lines = source.splitlines(keepends=True)
    for name, docstring in docstrings(source):
        if all(text == listed(table) for table, text in lists(name, docstring.value).items()):
            continue
        first, last = docstring.lineno - 1, docstring.end_lineno
        paragraphs = re.split(r"(\n\s*\n|\n *\"{3}|\w+:\n)", "".join(lines[first:last]))
        lines[first:last] = [
            "".join(_corrected(name, paragraph) for paragraph in paragraphs),
            *[""] * (last - first - 1),
        ]
    return "".join(lines)


def _corrected(name: str, paragraph: str) -> str:
    for table, text in lists(name, paragraph).items():
        indent = paragraph[: len(paragraph) - len(paragraph.lstrip())]
        said = " ".join(paragraph.split()).replace(f"`{text}`", f"`{listed(table)}`")
        paragraph = textwrap.fill(said, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return paragraph


def main() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "Columns" in source and (new := rewritten(source)) != source:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
