"""Commands about a model: `analyze` makes its table of heads, `verify` checks the operators."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tlspectral.cli.app import MODEL_HELP, Revision, app, require_writable
from tlspectral.cli.summary import self_check, summary


@app.command(short_help="one row per head of a model, as a table")
def analyze(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Parquet file to write; none: only print.")
    ] = None,
    null_draws: Annotated[int, typer.Option(min=2, help="Draws of the random null per head.")] = 300,
    no_detectors: Annotated[
        bool,
        typer.Option("--no-detectors", help="Weights only: no previous-token, duplicate and induction scores."),
    ] = False,
    backend: Annotated[str, typer.Option(help="auto, bridge or hooked (TransformerLens model class).")] = "auto",
    revision: Revision = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the table does not depend on it.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the null and the detectors.")] = 0,
    checkpoint_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --no-detectors: a folder that keeps each finished layer; the same command continues there.",
        ),
    ] = None,
) -> None:
    """Analyse every attention head of a model, print what stands out, and write the table.

    With --no-detectors and the automatic backend, a folder of safetensors or a hub model is read from its files, layer
    by layer, without loading the model.

    Example: tlspectral analyze smollm2-135m -o heads.parquet
    """
    if output is not None:
        require_writable(output)
    import tlspectral

    streamed: dict[str, Any] = {} if checkpoint_dir is None else {"checkpoint_dir": checkpoint_dir}
    if streamed and not (no_detectors and backend == "auto"):
        raise typer.BadParameter("goes with --no-detectors and the automatic backend", param_hint="--checkpoint-dir")
    began = time.perf_counter()
    streams = no_detectors and backend == "auto"
    loaded = model if streams else tlspectral.load_model(model, backend=backend, revision=revision)
    heads = tlspectral.analyze_heads(
        loaded,
        revision=revision if streams else None,
        null_draws=null_draws,
        detectors=not no_detectors,
        n_jobs=jobs,
        seed=seed,
        show_progress=True,
        **streamed,
    )
    if output is not None:
        tlspectral.write_table(heads, output)
    seconds = time.perf_counter() - began
    typer.echo(f"{output or model}: {len(heads)} heads in {seconds:.1f} s; {self_check(heads.attrs)}\n")
    typer.echo(summary(heads, top=5))


@app.command(short_help="do the operators reproduce the model's own scores?")
def verify(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    backend: Annotated[str, typer.Option(help="auto, bridge or hooked (TransformerLens model class).")] = "auto",
    revision: Revision = None,
) -> None:
    """Check that the operators reproduce the model's own attention scores, layer by layer.

    Example: tlspectral verify smollm2-135m
    """
    import tlspectral

    loaded = tlspectral.load_model(model, backend=backend, revision=revision)
    errors = tlspectral.verify_scores(loaded)
    typer.echo("layer  worst error")
    for layer, error in errors.items():
        typer.echo(f"{layer!s:>5}  {error:.2e}")
    typer.echo(f"{model}: the operators reproduce the model's own scores on all {len(errors)} layers")
