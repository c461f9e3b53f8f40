"""Pages of the site that are generated when it is built: start, columns, architectures, commands, Python reference.

mkdocs calls `on_files`. Each page comes from what it describes, so that none of them can be out of date.
"""

import csv
import re
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from tlspectral.tables import Column

ROOT = Path(__file__).parents[2]

IN_ROOMS = {
    "tlspectral.hooks.sweeps": ("band_effects", "summarize_sweep"),
    "tlspectral.heads": ("copying_scores", "qk_penalty"),
    "tlspectral.hooks.parts": (
        "Antisymmetric",
        "Band",
        "Content",
        "Interaction",
        "LongRange",
        "Output",
        "Position",
        "RopePhase",
        "Symmetric",
    ),
    "tlspectral.spectral_rope": ("SpectralRoPE",),
    "tlspectral.stats": (
        "attenuation",
        "layer_bootstrap",
        "model_permutation_test",
        "partial_spearman",
        "top_head_percentile",
    ),
    "tlspectral.tasks": ("induction_loss", "language_loss"),
}
"""Public names that are reached by their room, as `tls.stats.attenuation`."""


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
    from tlspectral.tables import every_schema

    tables = every_schema()

    lines = [
        "# Columns",
        "",
        "Every column of the tables that functions return and commands write. A name may mean something else in "
        "another table. `tlspectral.tables.describe_table(NAME)` gives a section of this page as a DataFrame; the "
        "entries also travel in the parquet files that `write_table` and the commands write.",
        "",
        "Tables: " + ", ".join(f"[{_cell(name)}](#{_anchor(name)})" for name in tables) + ".",
        "",
    ]
    described: dict[Column, str] = {}  # where each entry stands on the page
    for name, table in tables.items():
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
        "streamed is listed in `tlspectral.models.checkpoints.STREAMED_MODEL_TYPES`. The column *learns* says what "
        "`to_spectral` makes of a reproduced model of transformers, and of its bridge where that is another outcome. "
        "*trains*: the same logits to the bit at the start, both compute the same function after a move of all "
        "spectral parameters, gradients are the same to the bit under both kinds of gradient checkpointing, and the "
        "model that was given has none.",
        "",
        *(f"- {count}" for count in counts),
        "",
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


def api_page() -> str:
    """Every public name, where it lives."""
    import tlspectral

    lines = ["# Python", "", "Everything below is imported as `import tlspectral as tls`.", ""]
    for room, names in {"tlspectral": tlspectral.__all__, **IN_ROOMS}.items():
        module = import_module(room)
        lines += [f"## `{room.replace('tlspectral', 'tls')}`", ""]
        lines += [f"::: {getattr(module, name).__module__}.{name}\n" for name in names]
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
