"""Pages of the site that are generated when it is built: start, columns, architectures, commands, Python reference.

mkdocs calls `on_files`. Each page comes from what it describes, so that none of them can be out of date.
"""

import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from tlspectral.tables import Column

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and README and CONTRIBUTING as pages of the site."""
    pages = {
        "api.md": api_page,
        "architectures.md": architectures_page,
        "columns.md": columns_page,
        "commands.md": commands_page,
        "contributing.md": contributing_page,
        "index.md": start_page,
    }
    for name, make in pages.items():
        files.append(File.generated(config, name, content=make()))
    return files


def columns_page() -> str:
    """The column dictionary, one section per table; a column that comes again is a link to where it is described."""
    from tlspectral.tables import TABLES

    lines = [
        "# Columns",
        "",
        "Every column of the tables that functions return and commands write. A name may mean something else in "
        "another table. `tlspectral.tables.describe_table(NAME)` gives a section of this page as a DataFrame; the "
        "entries also travel in the parquet files that `write_table` and the commands write.",
        "",
        "Tables: " + ", ".join(f"[{_cell(name)}](#{_anchor(name)})" for name in TABLES) + ".",
        "",
    ]
    described: dict[Column, str] = {}  # where each entry stands on the page
    for name, table in TABLES.items():
        lines += [f"## {_cell(name)} {{ #{_anchor(name)} }}", "", f"Made by {table.made_by}.", ""]
        again = [f"[`{column.name}`](#{described[column]})" for column in table.columns if column in described]
        if again:
            lines += [f"As described above: {', '.join(again)}.", ""]
        for column in table.columns:
            if column in described:
                continue
            anchor = column.name.lower()
            described[column] = anchor if anchor not in described.values() else _anchor(name, column.name)
            lines += _column_section(column, described[column])
    return "\n".join(lines)


def _anchor(*names: str) -> str:
    return "-".join(["table", *names]).replace(".", "-").lower()


def _column_section(column: "Column", anchor: str) -> list[str]:
    lines = [
        f"### `{column.name}` {{ #{anchor} }}",
        "",
        _cell(column.meaning),
        "",
        f"- unit: {_cell(column.unit)}",
        f"- range: {_cell(column.range)}",
        f"- source: {_cell(column.source)}",
    ]
    if column.also_known_as:
        lines.append(f"- also known as: {_cell(column.also_known_as)}")
    if column.does_not_establish:
        lines += ["", f"**Does not establish:** {_cell(column.does_not_establish)}"]
    return [*lines, ""]


def architectures_page() -> str:
    """What `verify_scores` says of a tiny random model of every attention shape, with this build's versions."""
    sys.path.insert(0, str(ROOT / "tests"))
    import zoo

    from tlspectral import verify_scores
    from tlspectral.errors import TlspectralError
    from tlspectral.models.loading.bridge import build_bridge

    names = (*zoo.ARCHITECTURES, *zoo.FALCONS, *zoo.LENGTH_DEPENDENT, *zoo.REFUSED)
    backends = {"TransformerBridge": (lambda name: build_bridge(zoo.hf_model(name), None, name), names)}
    if zoo.HAS_HOOKED:
        backends["HookedTransformer"] = (zoo.hooked, zoo.HOOKED_ARCHITECTURES)
    found: dict[str, dict[str, str]] = {}
    for backend, (build, names) in backends.items():
        for name in names:
            try:
                said = f"passes, worst error {float(verify_scores(build(name)).max()):.1e}"
            except TlspectralError as error:
                said = f"refused: {_cell(str(error))}"
            found.setdefault(name, {})[backend] = said
    lines = [
        "# Architectures",
        "",
        "What the self-check says of a tiny random model of each attention shape: can the folded operators reproduce "
        "the model's own attention scores? Jittered norms and enlarged query and key weights make scores near 10, and "
        f"1e-5 + 1e-5 of that is allowed. Checked while this page was built, with TransformerLens "
        f"{version('transformer-lens')} and transformers {version('transformers')}; the same tests run on "
        "TransformerLens 4.",
        "",
        f"| shape | {' | '.join(backends)} |",
        f"|---|{'---|' * len(backends)}",
    ]
    for name, by_backend in found.items():
        cells = [by_backend.get(backend, "no such model from a local checkpoint") for backend in backends]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "`analyze_heads` runs this check on your model before anything else, so a shape that is not listed is either "
        "right or refused. Teaching it a new one: [Contributing](contributing.md#a-new-architecture).",
        "",
    ]
    return "\n".join(lines)


def commands_page() -> str:
    """The help text of every command."""
    import typer.main
    from typer.cli import get_docs_for_click

    from tlspectral.cli import app

    group = typer.main.get_command(app)
    text = get_docs_for_click(obj=group, ctx=typer.Context(group), name="tlspectral")
    return text.replace("# `tlspectral`", "# Command line", 1)


def api_page() -> str:
    """Every public name, where it lives."""
    import tlspectral

    lines = ["# Python", "", "Everything below is imported as `import tlspectral as tls`.", ""]
    for name in tlspectral.__all__:
        home = getattr(tlspectral, name).__module__
        lines += [f"::: {home}.{name}", ""]
    return "\n".join(lines)


def start_page() -> str:
    """README.md, its links to pages of the site mended and those to files outside it taken out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    text = text.replace("](CONTRIBUTING.md)", "](contributing.md)")
    return re.sub(r"\[([^\]]+)\]\((?:CITATION\.cff|CHANGELOG\.md)\)", r"\1", text)


def contributing_page() -> str:
    """CONTRIBUTING.md as it is."""
    return (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def _cell(text: str) -> str:
    """Text that stays inside a table and shows its angle brackets, bars and underscores."""
    for sign in "|<>_*":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
