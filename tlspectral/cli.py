"""The command line: `tlspectral analyze`, `show`, `ablate`, `verify` and `plane`.

Everything heavy is imported inside the commands, so that help and version answer at once.
"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tlspectral import __version__
from tlspectral.errors import TlspectralError

if TYPE_CHECKING:
    import pandas as pd

_REFUSAL = 2
_OTHER_PREV = 0.1  # heads below it serve as others beside previous-token heads
_MODEL_HELP = "Hub name, local folder, .gguf file, or a demo model: tiny-rope, tiny-ape, smollm2-135m."


class _OneLineErrors(TyperGroup):
    """Prints what a user can mend as one line; --debug lets the traceback through."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (TlspectralError, ValueError, OSError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            said = " ".join(str(error).split()) or type(error).__name__
            typer.echo(f"tlspectral: error: {said}", err=True)
            raise typer.Exit(_REFUSAL) from error


app = typer.Typer(
    cls=_OneLineErrors,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_TableFile = Annotated[Path, typer.Argument(metavar="TABLE", help="Parquet file written by tlspectral.")]


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"tlspectral {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The spectrum of attention heads: one table row per head, against a matched random null."""


@app.command()
def analyze(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Parquet file to write; none: only print.")
    ] = None,
    null_draws: Annotated[int, typer.Option(min=0, help="Draws of the random null per head.")] = 300,
    no_detectors: Annotated[
        bool,
        typer.Option("--no-detectors", help="Weights only: no previous-token, duplicate and induction scores."),
    ] = False,
    backend: Annotated[str, typer.Option(help="auto, bridge or hooked (TransformerLens model class).")] = "auto",
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the table does not depend on it.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the null and the detectors.")] = 0,
) -> None:
    """Analyse every attention head of a model, print what stands out, and write the table.

    With --no-detectors and the automatic backend, a folder of safetensors is read layer by layer, without loading the
    model.

    Example: tlspectral analyze smollm2-135m -o heads.parquet
    """
    if output is not None:
        _require_writable(output)
    import tlspectral

    began = time.perf_counter()
    loaded = model if no_detectors and backend == "auto" else tlspectral.load_model(model, backend=backend)
    heads = tlspectral.analyze_heads(
        loaded, null_draws=null_draws, detectors=not no_detectors, n_jobs=jobs, seed=seed, show_progress=True
    )
    if output is not None:
        tlspectral.write_table(heads, output)
    seconds = time.perf_counter() - began
    typer.echo(f"{output or model}: {len(heads)} heads in {seconds:.1f} s; {_self_check(heads.attrs)}\n")
    typer.echo(_summary(heads, top=5))


def _require_writable(output: Path) -> None:
    """Before the long part: a path that cannot be written would lose it."""
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder: give -o a file name in it")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"no permission to write in {output.parent}: give -o another folder")


@app.command()
def show(
    table: _TableFile,
    top: Annotated[int, typer.Option(min=1, help="Rows of each list.")] = 5,
) -> None:
    """Print what stands out in a table of heads.

    Example: tlspectral show heads.parquet --top 10
    """
    from tlspectral.tables import read_table

    typer.echo(_summary(_head_table(read_table(table), table), top))


@app.command()
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    backend: Annotated[str, typer.Option(help="auto, bridge or hooked (TransformerLens model class).")] = "auto",
) -> None:
    """Check that the operators reproduce the model's own attention scores, layer by layer.

    Example: tlspectral verify smollm2-135m
    """
    import tlspectral

    loaded = tlspectral.load_model(model, backend=backend)
    errors = tlspectral.verify_scores(loaded)
    typer.echo("layer  worst error")
    for layer, error in errors.items():
        typer.echo(f"{layer!s:>5}  {error:.2e}")
    typer.echo(f"{model}: the operators reproduce the model's own scores on all {len(errors)} layers")


@app.command()
def plane(
    table: _TableFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Figure: .png, .pdf or .svg.")],
    highlight: Annotated[int, typer.Option(min=0, help="How many previous-token heads to ring and name.")] = 5,
) -> None:
    """Draw dir_frac against D_head with the null, the strongest previous-token heads ringed.

    Example: tlspectral plane heads.parquet -o plane.png
    """
    from tlspectral.plots import content_direction_plane
    from tlspectral.tables import read_table, whole_file

    figure = content_direction_plane(read_table(table), highlight_previous_token=highlight)
    with whole_file(output) as partial:
        figure.savefig(partial, dpi=200)
    typer.echo(str(output))


@app.command()
def ablate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    table: _TableFile,
    part: Annotated[str, typer.Option(help="rope_phase, symmetric, antisymmetric or output.")] = "rope_phase",
    task: Annotated[
        str, typer.Option(help="induction (random repeated tokens) or language (packaged text).")
    ] = "induction",
    top: Annotated[int, typer.Option(min=1, help="Strongest previous-token heads of TABLE.")] = 5,
    matched: Annotated[int, typer.Option(min=0, help="Random other heads of the same layers.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Parquet file to write; none: only print.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random heads and of the sequences.")] = 0,
) -> None:
    """Remove a part of the strongest previous-token heads, one head at a time, and of random heads beside them.

    Example: tlspectral ablate smollm2-135m heads.parquet --part rope_phase
    """
    if output is not None:
        _require_writable(output)
    import pandas as pd

    import tlspectral
    from tlspectral.tables import read_table

    heads = _head_table(read_table(table), table)
    strongest = heads.nlargest(top, "prev")
    others = heads[heads["layer"].isin(strongest["layer"]) & (heads["prev"] < _OTHER_PREV)]
    chosen = pd.concat([strongest, others.sample(min(matched, len(others)), random_state=seed)])
    loaded = tlspectral.load_model(model)
    sweep = tlspectral.ablation_sweep(loaded, part, heads=chosen, task=task, seed=seed)  # type: ignore[arg-type]
    if output is not None:
        tlspectral.write_table(sweep, output)
    shown = sweep.merge(heads[["layer", "head", "name", "prev"]], on=["layer", "head"])
    shown = shown.sort_values("delta", ascending=False)[
        ["name", "prev", "delta", "delta_stderr", "delta_p", "score_rms"]
    ]
    intact = float((sweep["loss"] - sweep["delta"]).iloc[0])
    typer.echo(
        f"{part} removed, one head at a time; change of the {task} loss in nats (intact {intact:.3f}); "
        "standard errors over sequences"
    )
    typer.echo(shown.round(3).to_string(index=False))


def _head_table(heads: "pd.DataFrame", path: Path) -> "pd.DataFrame":
    missing = [name for name in ("layer", "head", "D_head", "dir_frac") if name not in heads]
    if missing:
        raise ValueError(f"{path} is not a table of heads: it has no column {', '.join(missing)}")
    return heads


def _summary(heads: "pd.DataFrame", top: int) -> str:
    """What `show` prints: the model, the top heads per detector, the heads furthest from their null, the odd rows."""
    detectors = (("prev", "Previous-token"), ("dup", "Duplicate-token"), ("ind", "Induction"))
    parts = [_provenance(heads)]
    for name, title in detectors:
        scored = heads.dropna(subset=[name]).nlargest(top, name) if name in heads else heads.iloc[:0]
        if len(scored):
            columns = [name, f"{name}_se", "D_head", "D_head_null_pct", "dir_frac", "rope_imag_frac"]
            parts.append(f"{title} heads, by {name}\n{_rows(scored, columns)}")
    if not any(name in heads and heads[name].notna().any() for name, _ in detectors):
        parts.append("No detector scores in this table.")
    columns = ["D_head", "D_head_null_mean", "D_head_z", "D_head_null_pct", "dir_frac"]
    if "D_head_z" in heads and heads["D_head_z"].notna().any():
        ordered = heads.dropna(subset=["D_head_z"]).sort_values("D_head_z", kind="stable")
        above, below = ordered.query("D_head_z > 0").iloc[::-1].head(top), ordered.query("D_head_z < 0").head(top)
        if len(above):
            parts.append(f"D_head furthest above its null\n{_rows(above, columns)}")
        if len(below):
            parts.append(f"D_head furthest below its null\n{_rows(below, columns)}")
    else:
        parts.append("No null in this table.")
    parts.append(_statuses(heads))
    return "\n\n".join(parts)


def _provenance(heads: "pd.DataFrame") -> str:
    """Model, size, settings and self-check, as far as the table says them."""
    attrs = heads.attrs
    revision = f" ({attrs['revision']})" if attrs.get("revision") else ""
    lines = [
        f"{attrs.get('model', 'unnamed model')}{revision}: {len(heads)} heads in {heads['layer'].nunique()} layers",
    ]
    made = []
    if attrs.get("weights_sha256"):
        made.append(f"weights {str(attrs['weights_sha256'])[:12]}")
    if attrs.get("backend"):
        made.append(f"backend {attrs['backend']}")
    if attrs.get("null_draws") is not None:
        made.append(f"{attrs['null_draws']} null draws ({attrs.get('null_blocks', 'unknown')} blocks)")
    if attrs.get("seed") is not None:
        made.append(f"seed {attrs['seed']}")
    detectors = attrs.get("detectors")
    if detectors:
        count, length = detectors.get("n_sequences"), detectors.get("segment_length")
        made.append(f"detectors on {count} sequences [BOS, r, r], r of {length} tokens")
    if made:
        lines.append("; ".join(made))
    if attrs.get("versions"):
        lines.append(", ".join(f"{name} {version}" for name, version in attrs["versions"].items()))
    lines.append(_self_check(attrs))
    if attrs.get("rotary_valid_up_to") is not None:
        lines.append(f"rotary angles valid up to {attrs['rotary_valid_up_to']} tokens")
    return "\n".join(lines)


def _self_check(attrs: dict[Any, Any]) -> str:
    check = attrs.get("score_check")
    if not check or check.get("worst_error") is None:
        return "self-check: not made"
    text = f"self-check: worst error {check['worst_error']:.1e} in the model's own {check.get('compared', 'scores')}"
    if check.get("layer") is not None:
        text += f", layer {check['layer']}"
    if check.get("tolerance") is not None:
        text += f", tolerance {check['tolerance']:.1e}"
    return text


def _rows(heads: "pd.DataFrame", columns: list[str]) -> str:
    """Aligned text of some columns; a dash where there is no number."""
    names = (
        heads["name"] if "name" in heads else [f"L{x}H{y}" for x, y in zip(heads["layer"], heads["head"], strict=True)]
    )
    header = ["head", *(_SHOWN.get(column, column) for column in columns)]
    body = [
        [str(name), *(_number(heads[column].iloc[row], column) if column in heads else "-" for column in columns)]
        for row, name in enumerate(names)
    ]
    widths = [max(len(line[place]) for line in [header, *body]) for place in range(len(header))]
    return "\n".join(
        "  "
        + "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in [header, *body]
    )


_SHOWN = {
    "prev_se": "se",
    "dup_se": "se",
    "ind_se": "se",
    "D_head_null_pct": "null pct",
    "D_head_null_mean": "null mean",
}


def _number(value: Any, column: str) -> str:
    if value != value:
        return "-"
    if column.endswith("_z"):
        return f"{value:+.1f}"
    return f"{value:.4f}" if column.endswith("_se") else f"{value:.3f}"


def _statuses(heads: "pd.DataFrame") -> str:
    if "status" not in heads:
        return "status: not in this table"
    odd = heads.loc[heads["status"] != "ok", "status"].value_counts()
    if odd.empty:
        return f"status: ok for all {len(heads)} heads"
    counts = ", ".join(f"{count} {status}" for status, count in odd.items())
    return f"status: {counts}, {len(heads) - odd.sum()} ok"


if __name__ == "__main__":
    main()
