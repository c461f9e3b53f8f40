"""Pages of the Python reference, one for each question, made from docstrings when the site is built.

mkdocs calls `on_files` and `on_config`. `PAGES` says on which page a public name stands; `tests/test_site.py` checks
that each public name stands on exactly one.
"""

import inspect
import sys
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File, Files

PAGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "load": ("Load a model, and check that it is read rightly", ("load_model", "verify_scores", "qk_operators")),
    "heads": (
        "Describe heads: tables, detectors, directions",
        (
            "analyze_heads",
            "detect_heads",
            "top_pairs",
            "heads.attention_sinks",
            "relative_position_kernel",
            "heads.kernel_prediction",
            "head_directions",
            "k_composition",
            "heads.copying_scores",
            "frequency_table",
        ),
    ),
    "compare": (
        "Compare heads of several models or training steps",
        (
            "compare_heads",
            "head_likeness",
            "heads.side_by_side",
            "heads.analyze_models",
            "head_history",
            "history.suite_checkpoints",
            "history.HeadHistory",
        ),
    ),
    "tasks": (
        "Say what a model is measured on: prompts and a metric",
        (
            "Task",
            "logit_difference",
            "evaluate",
            "tasks.MetricValue",
            "tasks.Effect",
            "tasks.paired_effect",
            "tasks.induction",
            "tasks.induction_loss",
            "tasks.language",
            "tasks.language_loss",
            "tasks.embedding_change",
            "tasks.needle",
            "tasks.repeated_sequences",
        ),
    ),
    "ablate": (
        "Remove heads or parts of heads",
        (
            "ablate",
            "ablation_hooks",
            "ablation_sweep",
            "hooks.band_effects",
            "cache_prices",
            "hooks.summarize_sweep",
            "hooks.check_hook",
            "hooks.bake",
            "hooks.wall",
            "hooks.Wall",
        ),
    ),
    "parts": (
        "Parts of heads that can be removed",
        (
            "parts.Symmetric",
            "parts.Antisymmetric",
            "parts.RopePhase",
            "parts.Band",
            "parts.Mode",
            "parts.Content",
            "parts.Position",
            "parts.Interaction",
            "parts.LongRange",
            "parts.Output",
            "parts.Part",
            "parts.QueryKeyPart",
            "parts.part_of",
        ),
    ),
    "edges": (
        "Cut edges between heads, run circuits, find sets of heads",
        ("edge_effects", "hooks.receivers", "hooks.missed_edges", "run_circuit", "faithfulness", "sufficient_heads"),
    ),
    "attribution": (
        "Say why a head looks at a token, and what it writes",
        ("qk_attribution", "ov_attribution", "scores", "Dictionary"),
    ),
    "positional": (
        "Swap blocks of a prompt: positional or symbolic",
        (
            "positional_symbolic",
            "positional.logit_shares",
            "positional.exclusion_split",
            "positional.BlockPrompt",
            "positional.BlockTask",
            "positional.BlockDraw",
            "positional.Question",
            "positional.NeedleTask",
            "positional.CopyingTask",
            "positional.KeyValueTask",
            "positional.ListIndexTask",
            "positional.BindingTask",
            "positional.PromptFile",
            "positional.task_answers",
        ),
    ),
    "training": (
        "Train rotary frequencies, or with a part held down",
        (
            "to_spectral",
            "SpectralHookedTransformer",
            "spectral_rope.SpectralRoPE",
            "spectral_rope.parameter_groups",
            "spectral_rope.merge",
            "spectral_rope.save_spectral",
            "spectral_rope.load_spectral",
            "spectral_rope.omega_shift",
            "spectral_rope.OmegaMeter",
            "heads.qk_penalty",
        ),
    ),
    "pictures": (
        "Draw figures, and make pages about heads",
        (
            "plots.heads",
            "plots.plane",
            "plots.patterns",
            "plots.eigenvalues",
            "plots.kernel",
            "plots.ablation_effects",
            "plots.wall",
            "plots.circuit",
            "plots.faithfulness",
            "plots.qk_attribution",
            "plots.positional_symbolic_plane",
            "plots.exclusion_plane",
            "plots.rotary_plane",
            "report.report",
            "report.head_card",
            "report.HeadCard",
        ),
    ),
    "files": (
        "Read, write, join and share tables",
        (
            "write_table",
            "read_table",
            "tables.join",
            "tables.describe_table",
            "tables.describe_columns",
            "tables.shard",
        ),
    ),
    "stats": (
        "Test a claim about many heads",
        (
            "stats.partial_spearman",
            "stats.PartialCorrelation",
            "stats.layer_bootstrap",
            "stats.attenuation",
            "stats.model_permutation_test",
            "stats.top_head_percentile",
            "stats.benjamini_hochberg",
        ),
    ),
}
"""Pages of the reference: file name, title, and the names below `tls` in their order."""


def public(name: str) -> Any:
    """Return the object of a name below `tls`, as "ablate" or "parts.Output"."""
    sys.path[:0] = [str(Path(__file__).parents[2])] if "tlspectral" not in sys.modules else []
    import tlspectral

    *room, last = name.split(".")
    return getattr(getattr(tlspectral, room[0]) if room else tlspectral, last)


def on_config(config: Any) -> Any:
    """Let Markdown show examples of docstrings as code."""
    config.markdown_extensions.append(Doctests())
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each question, and a page that lists all names."""
    for page, (title, names) in PAGES.items():
        files.append(File.generated(config, f"api/{page}.md", content=api_page(title, names)))
    files.append(File.generated(config, "api/index.md", content=index_page()))
    return files


def api_page(title: str, names: tuple[str, ...]) -> str:
    """Return a page with the docstrings of some names."""
    lines = [f"# {title}", "", "`import tlspectral as tls`", ""]
    for name in names:
        call = public(name)
        path = f"{call.__module__}.{call.__name__}"
        lines += [f"::: {path}", "    options:", f"      heading: tls.{name}", f"      toc_label: {name}", ""]
    return "\n".join(lines)


def index_page() -> str:
    """Return the list of all public names by question, each with the first line of its docstring."""
    lines = ["# Python", "", "All public names, by question. `import tlspectral as tls`.", ""]
    for page, (title, names) in PAGES.items():
        lines += [f"## [{title}]({page}.md)", "", "| name | |", "|---|---|"]
        for name in names:
            call = public(name)
            anchor = f"{page}.md#{call.__module__}.{call.__name__}"
            lines.append(f"| [`tls.{name}`]({anchor}) | {first_line(call)} |")
        lines.append("")
    return "\n".join(lines)


def first_line(call: Any) -> str:
    """Return the first sentence of a docstring, or its first line, on one line of a Markdown table."""
    text = (inspect.getdoc(call) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return text if len(text) <= 200 else text[:200].rsplit(" ", 1)[0] + " ..."


class _Fences(Preprocessor):
    """Puts a fence around each example. Markdown takes `>>>` for three nested quotations."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines with fences in front of `>>>` and behind the last line of each example."""
        fenced: list[str] = []
        inside = False
        for line in [*lines, ""]:
            if line.startswith(">>>") and not inside:
                fenced.append("```pycon")
                inside = True
            elif inside and not line.strip():
                fenced.append("```")
                inside = False
            fenced.append(line)
        return fenced[:-1]


class Doctests(Extension):
    """The extension of Markdown that holds `_Fences`, in front of the one that reads fences."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the preprocessor."""
        md.preprocessors.register(_Fences(md), "doctests", 100)
