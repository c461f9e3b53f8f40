"""The lists of columns in docstrings, "Columns: `layer, head`.", beside the schemas of their tables.

Run as a command it writes the schemas' lists into the sources. A function that returns several tables names the one
that it lists: "Columns of `summary`: `step, value`."; any docstring may list another function's table in the same way,
by its whole name.
"""

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from tlspectral.tables import every_schema
from tlspectral.tables.schema import Schema

PACKAGE = Path(__file__).parents[1] / "tlspectral"
LIST = re.compile(r"Columns(?: of `([\w.-]+)`)?:\s+`([^`]*)`")
WIDTH = 120


def listed(schema: Schema) -> str:
    """The columns as a docstring lists them; `?` behind those that are not always there."""
    return ", ".join(column.name + "?" * (not column.always) for column in schema.columns)


def docstrings(source: str) -> Iterator[tuple[str, ast.Constant]]:
    """Names of functions and classes, and their docstrings in the source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
            (statement, *_) = node.body
            assert isinstance(statement, ast.Expr)
            assert isinstance(statement.value, ast.Constant)
            yield node.name, statement.value


def lists() -> Iterator[tuple[Path, ast.Constant, str, str]]:
    """Every list of the package: its file, its docstring, its table and what it lists, on one line."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for name, docstring in docstrings(source) if "Columns" in source else ():
            for found in LIST.finditer(docstring.value):
                part = found[1] or name
                yield path, docstring, part if part in SCHEMAS else f"{name}.{part}", " ".join(found[2].split())


SCHEMAS = every_schema()


def rewritten(source: str) -> str:
    """The source with the schemas' lists; a paragraph that held another list is wrapped anew."""
    lines = source.splitlines(keepends=True)
    for name, docstring in docstrings(source):
        first, last = docstring.lineno - 1, docstring.end_lineno
        text = "".join(lines[first:last])

        def replaced(found: re.Match[str], name: str = name) -> str:
            part = found[1] or name
            schema = SCHEMAS.get(part) or SCHEMAS[f"{name}.{part}"]
            same = " ".join(found[2].split()) == listed(schema)
            return found[0] if same else found[0].replace(f"`{found[2]}`", f"`{listed(schema)}`")

        changed = LIST.sub(replaced, text)
        if changed != text or (LIST.search(text) and max(map(len, text.splitlines())) > WIDTH):
            paragraphs = re.split(r"(\n\s*\n|\n *\"{3})", changed)
            lines[first:last] = ["".join(map(_wrapped, paragraphs)), *[""] * (last - first - 1)]
    return "".join(lines)


def _wrapped(paragraph: str) -> str:
    """A paragraph below its heading, each line at most as wide as the house allows."""
    if not LIST.search(paragraph):
        return paragraph
    heading, _, body = paragraph.rpartition(":\n") if re.match(r"\s*\w+:\n", paragraph) else ("", "", paragraph)
    indent = re.match(r"[ \n]*", body)[0]
    filled = textwrap.fill(
        " ".join(body.split()), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    return f"{heading}:\n{filled}" if heading else filled


def main() -> None:
    """Write the lists of every file that differs."""
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if (new := rewritten(source)) != source:
            path.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
