"""Commands about a model: `analyze` makes its table of heads, `verify` checks the query-key matrices."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tlspectral.cli.app import (
    MODEL_HELP,
    Device,
    DType,
    Format,
    Model,
    Quiet,
    Revision,
    Shard,
    app,
    deliver,
    keeps,
    listed_heads,
    require_shared,
    require_table_file,
)
from tlspectral.cli.terminal_summary import first_screen, self_check


@app.command(short_help="one row per head of a model or of many, as a table")
def analyze(
    models: Annotated[
        list[str],
        typer.Argument(metavar="MODEL", help=f"{MODEL_HELP} Or a text file that lists models, one per line."),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|FOLDER",
            help="Table to write, .parquet or .csv; for several models a folder. Default: print only.",
        ),
    ] = None,
    null_draws: Annotated[int, typer.Option(min=2, help="Draws of the random null per head.")] = 100,
    no_detectors: Annotated[
        bool,
        typer.Option("--no-detectors", help="Weights only: no previous-token, duplicate and induction scores."),
    ] = False,
    heads: Annotated[
        str | None,
        typer.Option(metavar="L5H1,L-1", help="Only these heads, layers (L-1: the last) or key/value groups (L5KV1)."),
    ] = None,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Threads for a loaded model (1 uses all cores), or processes that read layers from files."
        ),
    ] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the null and the detectors.")] = 0,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keep finished layers and detectors here; the same command resumes from them.",
        ),
    ] = None,
    shard: Shard = None,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Analyse every attention head of a model, print which heads stand out, and write the table.

    Example: tlspectral analyze smollm2-135m -o heads.parquet

    Example: tlspectral analyze models.txt gpt2 path/to/checkpoint -o many

    The table has a row per head: spectral numbers of its query-key matrix (such as `D_head` and `dir_frac`, shares from
    0 to 1) with their random null, and its mean attention on random repeated tokens (`prev`, `dup`, `ind`, 0 to 1).
    `tlspectral show` prints it again, and `tls.tables.describe_columns()` explains all columns.

    With --no-detectors, a folder of safetensors or a hub model is read from its files layer by layer, without loading
    the model. --device or --dtype load it nevertheless.

    Several models become one dataset of parquet files in FOLDER/heads, which pandas, duckdb and polars read. If a model
    fails, a file in FOLDER/failures says why, the next model follows, and the exit status is 1 at the end. The same
    command continues there: it tries failed models again and skips finished models. Several jobs may share FOLDER.

    Not shown: what a head does on text, or whether the model needs it: see `tlspectral ablate`.
    """
    from tlspectral.heads.many_models import is_model_list

    settings: Any = {
        "null_draws": null_draws,
        "detectors": not no_detectors,
        "n_jobs": jobs,
        "seed": seed,
    }
    if len(models) > 1 or is_model_list(models[0]):
        _refuse_of_many(folder=folder, revision=revision, heads=heads, device=device, dtype=dtype)
        if form is not None:
            raise typer.BadParameter("works for one model: several models are written to -o", param_hint="--format")
        _analyze_many(models, output, quiet, **settings)
        return
    (model,) = models
    require_table_file(output)
    require_shared(folder, "--folder")
    keeps(folder)
    streams = no_detectors and device is None and dtype is None
    chosen = listed_heads(heads)
    import tlspectral
    from tlspectral.models.loading.finding import find_source

    began = time.perf_counter()
    source: Any = find_source(model, revision) if streams else None
    if source is None or not source.streams:
        source = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    table = tlspectral.analyze_heads(source, heads=chosen, folder=folder, **settings)
    deliver(table, output, form)
    if form is None and not quiet:
        seconds = time.perf_counter() - began
        typer.echo(f"{output or model}: {len(table)} heads in {seconds:.1f} s; {self_check(table.attrs)}\n")
        typer.echo(first_screen(table, top=5))


def _refuse_of_many(**for_one: Any) -> None:
    """Raise typer's BadParameter if one of these options of `analyze` has a value, because several models are given
    and the option works for one model. Keywords are the options' names.
    """
    for name, value in for_one.items():
        if value is not None:
            hint = ": with several models, -o keeps finished layers" if name == "folder" else ": leave it out"
            raise typer.BadParameter(f"works for one model{hint}", param_hint=f"--{name}")


def _analyze_many(models: list[str], output: Path | None, quiet: bool, **settings: Any) -> None:
    """Analyse several models, write their dataset into the folder `output`, print failures, and exit with status 1 if
    any model failed.

    `settings` are arguments of `analyze_models`. Raises typer's BadParameter without a folder.
    """
    if output is None:
        raise typer.BadParameter(
            "several models need a folder for their dataset: give -o FOLDER", param_hint="--output"
        )
    from tlspectral.heads import analyze_models

    keeps(output)
    failures = analyze_models(models, output, **settings)
    for row in failures.to_dict(orient="records"):
        typer.echo(f"{row['model']}: {row['error']}: {' '.join(row['message'].split())}", err=True)
    named = len(failures.attrs["models"])
    if len(failures):
        typer.echo(f"{output / 'heads'}: {len(failures)} of {named} models failed, see {output / 'failures'}")
        raise typer.Exit(1)
    if not quiet:
        typer.echo(f"{output / 'heads'}: 0 of {named} models failed")


@app.command(short_help="do the operators reproduce the model's own scores?")
def verify(
    model: Model,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Check that the query-key matrices reproduce the model's own attention scores, layer by layer.

    Example: tlspectral verify smollm2-135m

    It prints the largest absolute error of each layer, in units of the score (logits). If an error exceeds its
    tolerance, the message names the layer, and the exit status is 2.

    Not shown: whether MLPs or values are read correctly; only scores before the softmax are compared.
    """
    import tlspectral

    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    errors = tlspectral.verify_scores(loaded)
    deliver(errors.rename("worst_error").reset_index(), None, form)
    if form is not None or quiet:
        return
    typer.echo("layer  worst error")
    for layer, error in errors.items():
        typer.echo(f"{layer!s:>5}  {error:.2e}")
    typer.echo(f"{model}: the operators reproduce the model's own scores on all {len(errors)} layers")
