"""Pages of the site that are generated when it is built: start, tables, architectures, commands.

The Python reference is in `api_pages.py`. mkdocs calls `on_files` and `on_page_markdown`. Each page is made from the
objects that it describes, so it cannot be out of date.
"""

import csv
import html
import re
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from tlspectral.tables.schema import Column, Schema

ROOT = Path(__file__).parents[2]

NOT_SEARCHED = "---\nsearch: {exclude: true}\n---\n"
"""Front matter of a page that the search leaves out. 120 pages of columns would come before pages that explain them."""

ON_THE_SITE = {
    "../CONTRIBUTING.md": "contributing.md",
    "site/families-tl4.csv": "architectures.md",
    "site/spectral-families-tl4.csv": "architectures.md",
}
"""Links that lead to a file in the repository, and the generated page that they lead to here."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Lead links to their generated pages, and put a table with a filter in place of `<!-- filter FILE.csv -->`."""
    for file, page in ON_THE_SITE.items():
        markdown = re.sub(rf"\]\({re.escape(file)}(?=[#)])", f"]({page}", markdown)
    return re.sub(r"<!-- filter (\S+\.csv) -->", lambda match: filtered_table(ROOT / "docs" / match[1]), markdown)


def filtered_table(path: Path) -> str:
    """Return a CSV file as an HTML table below a field that hides the rows without its words and another verdict."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in rows[0])
    body = "\n".join(
        f'<tr data-verdict="{html.escape(row["verdict"])}">'
        + "".join(f"<td>{html.escape(text)}</td>" for text in row.values())
        + "</tr>"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return (ROOT / "docs/site/filter.html").read_text(encoding="utf-8").replace("$TABLE", table)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and README and CONTRIBUTING as pages of the site."""
    pages = {
        "architectures.md": architectures_page,
        "commands.md": commands_page,
        "contributing.md": contributing_page,
        "index.md": start_page,
    }
    for name, content in {**{name: make() for name, make in pages.items()}, **column_pages()}.items():
        files.append(File.generated(config, name, content=content))
    return files


def column_pages() -> dict[str, str]:
    """A list of all tables, those of studies apart, and a page for each with its columns."""
    from tlspectral.tables.every_table import every_schema

    tables = every_schema()
    made_by = {name: table.made_by or f"`{_maker(name)}`" for name, table in tables.items()}
    studies = [
        name for name, maker in made_by.items() if "tlspectral_studies." in maker or "tlspectral study " in maker
    ]
    lines = [
        "# Tables",
        "",
        "Every table that functions return and commands write, with its columns. A name may mean something else in "
        "another table. `tlspectral.tables.describe_table(NAME)` gives a page as a DataFrame; the entries also travel "
        "in the parquet files that `write_table` and the commands write.",
    ]
    for title, names in (("Of the package", [*made_by.keys() - studies]), ("Of the studies", studies)):
        lines += ["", f"## {title}", "", "| table | made by |", "|---|---|"]
        lines += [f"| [{_cell(name)}](columns/{_file(name)}) | {made_by[name]} |" for name in made_by if name in names]
    pages = {f"columns/{_file(name)}": _table_page(table, made_by[name]) for name, table in tables.items()}
    return {"columns.md": "\n".join(lines), **pages}


def _file(name: str) -> str:
    return f"{name.replace('.', '-').lower()}.md"


def _maker(table: str) -> str:
    """The function that returns a table, with its module."""
    function = table.partition(".")[0]
    modules = ((name, module) for name, module in sys.modules.items() if name.startswith("tlspectral."))
    homes = [name for name, module in modules if getattr(getattr(module, function, None), "__module__", "") == name]
    return f"{homes[0]}.{table}" if homes else table


def _table_page(table: "Schema", made_by: str) -> str:
    lines = [NOT_SEARCHED, f"# {_cell(table.name)}", "", f"Made by {made_by}.", ""]
    if any(column.range for column in table.columns):
        return "\n".join([*lines, *(line for column in table.columns for line in _column_section(column))])
    lines += ["| column | unit | |", "|---|---|---|"]
    lines += [f"| `{column.name}` | {_cell(column.unit)} | {_cell(column.meaning)} |" for column in table.columns]
    return "\n".join(lines)


def _column_section(column: "Column") -> list[str]:
    texts = {"unit": column.unit, "range": column.range, "source": column.source, "also known as": column.also_known_as}
    lines = [
        f"## {_cell(column.title)} {{ #{column.name.lower()} }}",
        "",
        f"`{column.name}`: {_cell(column.meaning)}",
        "",
    ]
    lines += [f"- {name}: {_cell(text)}" for name, text in texts.items() if text]
    if column.does_not_establish:
        lines += ["", f"**Does not establish:** {_cell(column.does_not_establish)}"]
    return [*lines, ""]


REFUSED = """\
| family | what a layer would take |
|---|---|
| mamba, mamba2, falcon_mamba, rwkv | nothing to read: no layer has a softmax over products of queries and keys |
| hunyuan_v1_dense | a norm with gains behind the rotation. M is one matrix at every offset only if the product of the \
gains of queries and keys is equal within each rotary pair |
| deepseek_v4 | keys that summarise several tokens, and several residual streams: no score is a form of two tokens |
| jetmoe | a matrix per head: which experts make the queries of a token is the router's choice |
| hrm_text | a table by run: its layers run several times in one pass, so a head has several attention patterns |
| zamba2 | operators twice as wide: M acts on the stream beside the embedding |
| gemma3n, gemma4: layers with keys of an earlier layer | operators of two streams: `n_i` of one, `n_j` of another |
| layers that clip queries and keys; Falcon with ALiBi | a bilinear score: these have none in the published form |
"""
"""Families and layers that are not read on TransformerLens 4.3, as rows of Markdown."""

LINES = (
    "Take TransformerLens 4 unless you need HookedTransformer, which is in TransformerLens 3 "
    "alone. On 3.9 Command R, Qwen3-Next and Qwen3.5 are refused, since its bridges compute something else or cannot "
    "split their queries, and of encoders RoBERTa."
)


def architectures_page() -> str:
    """What becomes of a tiny model of every family, as `make families` wrote it on each line of TransformerLens."""
    tables = {path.stem[-1]: _rows(path) for path in sorted((ROOT / "docs" / "site").glob("families-tl*.csv"))}
    counts = [
        f"{len(rows)} forms of {len({family for family, _ in rows})} families on TransformerLens {line}: "
        + ", ".join(f"{number} {word}" for word, number in Counter(row["loaded"] for row in rows.values()).items())
        for line, rows in tables.items()
    ]
    learned = {
        path.stem[-1]: _rows(path) for path in sorted((ROOT / "docs" / "site").glob("spectral-families-tl*.csv"))
    }
    lines = [
        "# Architectures",
        "",
        "What becomes of a tiny random model of every causal family of transformers that TransformerLens can hold. "
        "*reproduced*: logits and attention patterns are those of transformers' own model, and the folded operators "
        "reproduce its scores. *refused*: an error says why. The column *streamed* says whether the table made from "
        "the files, layer by layer, is the one of the loaded model; *unconfirmed*: the scores of each layer are "
        "reproduced, and there is no loaded table to compare with. Windows are shorter than the prompt, multipliers "
        "are not 1, gains and biases are jittered. A form names the setting that differs from the usual one. What is "
        "streamed is in `models.checkpoints.layers.STREAMED_MODEL_TYPES`. The column *learns* says what "
        "`to_spectral` makes of a reproduced model of transformers, and of its bridge where that is another outcome. "
        "*trains*: the same logits to the bit at the start, both compute the same function after a move of all "
        "spectral parameters, gradients are the same to the bit under both kinds of gradient checkpointing, and the "
        "model that was given has none.",
        "",
        *(f"- {count}" for count in counts),
        "",
        LINES,
        "",
        "What is not read, and why:",
        "",
        REFUSED,
        f"| family | form | {' | '.join(f'TransformerLens {line} | streamed | learns' for line in tables)} | reason |",
        f"|---|---|{'---|---|---|' * len(tables)}---|",
    ]
    for key in dict.fromkeys(key for rows in tables.values() for key in rows):
        by_line = [rows.get(key, {"loaded": "", "streamed": "", "reason": ""}) for rows in tables.values()]
        by_line_learned = [rows.get(key, {"reason": ""}) for rows in learned.values()]
        outcomes = " | ".join(
            f"{row['loaded']} | {row['streamed']} | {_learns(row_learned)}"
            for row, row_learned in zip(by_line, by_line_learned, strict=True)
        )
        reasons = "; ".join(dict.fromkeys(row["reason"] for row in (*by_line, *by_line_learned) if row["reason"]))
        lines.append(f"| {_cell(key[0])} | {_cell(key[1])} | {outcomes} | {_cell(reasons)} |")
    lines += [
        "",
        "`analyze_heads` checks scores on your model before anything else, so a form that is not listed is either "
        "right or refused. Teaching it a new one: [Contributing](contributing.md#a-new-architecture).",
        "",
    ]
    return "\n".join(lines)


def _learns(row: dict[str, str]) -> str:
    found = [row[kind] for kind in ("transformers", "bridge") if kind in row]
    return f"{found[0]}, bridge {found[1]}" if len(set(found)) == 2 else "".join(found[:1])


def _rows(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {(row["family"], row["form"]): row for row in csv.DictReader(file)}


def commands_page() -> str:
    """The help text of every command."""
    import typer.main
    from typer.cli import get_docs_for_click

    from tlspectral.cli import app

    group = typer.main.get_command(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group), name="tlspectral")
    return text.replace("# `tlspectral`", "# Command line", 1)


def start_page() -> str:
    """README.md, its links to pages of the site mended and those to files outside it taken out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)")
    return re.sub(r"\[([^\]]+)\]\((?:CITATION\.cff|CHANGELOG\.md)\)", r"\1", text)


def contributing_page() -> str:
    """CONTRIBUTING.md, its links to pages mended."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").replace("](docs/", "](")


def _cell(text: str) -> str:
    """Text that stays inside a table and shows its angle brackets, bars and underscores."""
    for sign in "|<>_*":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
