"""Commands of the study of "Fingerprint, Not Blueprint".

`replicate`, `statistics`, `schemes`, `constrained`, `formation`, `beside-published`.
"""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlspectral.cli.app import (
    MODEL_HELP,
    Device,
    DType,
    FigureOutput,
    Format,
    Preset,
    Quiet,
    Revision,
    Shard,
    TableFile,
    TableOutput,
    TrainedOn,
    deliver,
    require_table_file,
    require_writable,
    write_figure,
)
from tlspectral.cli.terminal_summary import read_heads

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer()

_SHOWN = ("where", "what", "published", "ours", "why")
_PUBLISHED = "published:"


@app.command(short_help="published numbers, computed again")
def replicate(
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            help="Folder for the table, its CSV and the figures.",
        ),
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE", help="formation.parquet of your own constrained grid, shown beside the published."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also print numbers that were reproduced.")] = False,
) -> None:
    """Recompute the numbers of "Fingerprint, Not Blueprint" from its published tables, and decide its sentences.

    Example: tlspectral study replicate -o out/replication

    Numbers that differ come with the reason, sentences with what decides them.
    """
    if output is not None:
        require_writable(output / "replication.parquet")
    from tlspectral.tables import read_table, write_table
    from tlspectral_studies.fingerprint import replication

    compared = None if grid is None else replication.arms_beside_published(read_table(grid))
    began = time.perf_counter()
    table = replication.replicate()
    seconds = time.perf_counter() - began
    for verdict in (name for name in replication.VERDICTS if every or name != replication.VERDICTS[0]):
        rows = table.loc[(table["kind"] == "number") & (table["verdict"] == verdict)]
        typer.echo(f"{verdict}: {len(rows)}")
        for where, what, published, ours, why in zip(*(rows[name] for name in _SHOWN), strict=True):
            here = "" if math.isnan(ours) else f", here {ours:.4g}"
            typer.echo(f"  {where}: {what}: printed {published}{here}" + (f"\n      {why}" if why else ""))
        typer.echo("")
    for verdict, count in table.attrs["sentences"].items():
        typer.echo(f"{verdict}: {count} sentences")
        for _, row in table.loc[(table["kind"] == "sentence") & (table["verdict"] == verdict)].iterrows():
            typer.echo(f'  {row["where"]}: "{row["published"]}"')
            typer.echo(f"      {replication.rule_finds(row)}")
            typer.echo(f"      {replication.deciding(row)}")
            typer.echo(f"      tested: {row['what']}; n = {row['n']}; power: {row['power']}\n      {row['why']}")
            if row["choices"]:
                typer.echo(f"      other readings: {row['choices']}")
        typer.echo("")
    if compared is not None:
        typer.echo(
            "Formation in steps, over runs that formed: published, and your grid by the loss and by both criteria"
        )
        typer.echo(compared.round(2).to_string(index=False) + "\n")
    typer.echo(_counts(table, seconds))
    if output is not None:
        from tlspectral_studies.fingerprint.figures.replication import published_figures

        write_table(table, output / "replication.parquet")
        replication.readable(table).to_csv(output / "replication.csv", index=False, lineterminator="\n")
        for name, figure in published_figures().items():
            write_figure(figure, output / f"{name}.png")
        typer.echo(str(output))


def _counts(table: "pd.DataFrame", seconds: float) -> str:
    """How many sentences and numbers have each verdict, in two lines."""
    from tlspectral_studies.fingerprint.replication import counted

    sizes = table["kind"].value_counts()
    return (
        f"{sizes.get('sentence', 0)} sentences: {counted(table.attrs['sentences'])}\n"
        f"{sizes.get('number', 0)} published numbers in {seconds:.0f} s: {counted(table.attrs['verdicts'])}"
    )


@app.command(short_help="the row of the paper's Tables 2 and 3, for a model")
def statistics(
    table: TableFile,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help=f"Also placebos and the rounding of weights. {MODEL_HELP}")
    ] = None,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    top: Annotated[int, typer.Option(min=1, help="Previous-token heads, an odd number.")] = 5,
    seed: Annotated[int, typer.Option(help="Of resamples, placebos and perturbations.")] = 0,
    output: TableOutput = None,
    form: Format = None,
    quiet: Quiet = False,
) -> None:
    """Print the row that Tables 2 and 3 of "Fingerprint, Not Blueprint" would have for a model, with intervals.

    Example: tlspectral study statistics heads.parquet --model smollm2-135m
    """
    require_table_file(output)
    for option, value in (("--revision", revision), ("--device", device), ("--dtype", dtype)):
        if value is not None and model is None:
            raise typer.BadParameter("goes with --model", param_hint=option)
    import tlspectral
    from tlspectral_studies.fingerprint.statistics import another_model

    heads = read_heads(table)
    loaded = None if model is None else tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    results = another_model(heads, model=loaded, k=top, seed=seed)
    deliver(results, output, form)
    if form is not None or quiet:
        return
    shown = results.drop(columns=["function", "pvalue_floor", "pvalue_of", "reason"]).round(3)
    typer.echo(shown.to_string(index=False, na_rep=""))
    typer.echo("")
    for row in results.to_dict(orient="records"):
        name = f"{row['statistic']} ({row['method']})"
        if row["pvalue"] == row["pvalue"]:
            floor = row["pvalue_floor"]
            least = f" (smallest possible {floor:.4f})" if floor == floor else ""
            typer.echo(f"p of {name}: {row['pvalue']:.4f}{least}: {row['pvalue_of']}")
        if row["reason"]:
            typer.echo(f"{name}: {row['reason']}")
    if output is not None:
        typer.echo(str(output))


@app.command(short_help="previous-token heads of several models side by side")
def schemes(
    tables: Annotated[
        list[str], typer.Argument(metavar="TABLE...", help="Tables of heads, or published ones such as published:gpt2.")
    ],
    top: Annotated[int, typer.Option(min=1, help="Previous-token heads per model.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Figure: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Compare where the strongest previous-token heads of models stand by D_head, with rotary positions and without.

    Example: tlspectral study schemes heads.parquet published:gpt2 published:pythia-410m -o compare.png
    """
    if output is not None:
        require_writable(output)
    from tlspectral_studies.fingerprint.replication import scheme_contrast

    contrast = scheme_contrast(_named(tables), k=top)
    shown = contrast.models.sort_values("percentile", kind="stable", ascending=False)
    typer.echo(f"Percentile of D_head within the model, median of the top {top} previous-token heads")
    typer.echo(shown.drop(columns="k").round(3).to_string(index=False))
    test = contrast.test
    if test is None:
        only = contrast.models["scheme"].iloc[0]
        typer.echo(f"All models are {only}: no test between rotary positions and others")
    else:
        apart = f"separated by {test.gap:.3f}" if test.separated else f"overlap by {-test.gap:.3f}"
        typer.echo(
            f"RoPE against the rest, {test.n} models: {apart}; exact permutation p = {test.pvalue:.3f}, one-sided, "
            f"smallest possible {test.floor:.3f}"
        )
    if output is not None:
        from tlspectral_studies.fingerprint.figures.replication import scheme_percentiles

        write_figure(scheme_percentiles(contrast), output)
        typer.echo(str(output))


def _named(tables: list[str]) -> "dict[str, pd.DataFrame]":
    """The tables by the name of their model; a name that comes twice is followed by the file's."""
    from tlspectral_studies.fingerprint.published import published_heads

    again = [given for index, given in enumerate(tables) if given in tables[:index]]
    if again:
        raise ValueError(f"{again[0]} is named twice, and would count as two models")
    named: dict[str, pd.DataFrame] = {}
    for given in tables:
        if given.startswith(_PUBLISHED):
            name, table = given, published_heads(given.removeprefix(_PUBLISHED))
        else:
            table = read_heads(Path(given))
            name = str(table.attrs.get("model") or Path(given).stem)
            name = f"{name} ({given})" if name in named else name
        named[name] = table
    return named


@app.command(short_help="train two-layer models with one spectral channel held down")
def constrained(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for cells and tables; it is resumed.")
    ],
    preset: Preset = "quick",
    arms: Annotated[str | None, typer.Option(help="Arms, with commas between; none: all.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds per arm; one leaves nothing to compare.")] = 5,
    until: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEP", help="Train no further than this step for now. Default: to the end."),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each; the numbers do not depend on it.")] = 1,
    device: TrainedOn = "cpu",
    shard: Shard = None,
) -> None:
    """Train two-layer models freely and with M or its phase constrained, and test when the circuit forms.

    Example: tlspectral study constrained -o out/constrained --jobs 2

    Weights and optimizer are kept every 100 steps. A command that was stopped at any moment goes on from there when it
    is given again, and gives the tables it would have given.
    """
    from tlspectral_studies.fingerprint.constrained import ARMS, constrained_grid

    names = ",".join(ARMS) if arms is None else arms
    tables = constrained_grid(
        output,
        preset,
        arms=[name.strip() for name in names.split(",")],
        seeds=seeds,
        until=until,
        n_jobs=jobs,
        device=device,
        command=f"tlspectral study constrained --preset {preset} --arms {names} --seeds {seeds}"
        + f" --until {until}" * (until is not None)
        + f" --device {device}" * (device != "cpu"),
    )
    for name, table in tables.items():
        typer.echo(f"{output / name}.parquet: {len(table)} rows")
    if seeds == 1:
        typer.echo("One seed: contrasts and spreads are over seeds, and are NaN")
    for name in ("formation", "table4"):
        typer.echo(tables[name].round(4).to_string(index=False))


@app.command(short_help="figure of constrained training")
def formation(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a grid of constrained training.")],
    output: FigureOutput,
) -> None:
    """Draw the tables of `tlspectral study constrained`: curves, times, dissociation, kernels.

    Example: tlspectral study formation out/constrained -o formation.png
    """
    from tlspectral.tables import read_table
    from tlspectral_studies.fingerprint.figures import formation as draw

    tables = [read_table(folder / f"{name}.parquet") for name in ("evaluations", "formation", "rerouting", "kernels")]
    write_figure(draw(*tables), output)
    typer.echo(str(output))


@app.command(short_help="a paper-sized grid beside the published runs")
def beside_published(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a grid of the preset paper.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the three tables.")
    ] = None,
) -> None:
    """Compare a paper-sized grid, finished or not, with the published runs of the same seeds: losses, formation, heads.

    Example: tlspectral study beside-published out/paper
    """
    if output is not None:
        require_writable(output / "steps.parquet")
    from tlspectral.tables import read_table, write_table
    from tlspectral_studies.fingerprint import replication

    found = replication.beside_published(
        {name: read_table(folder / f"{name}.parquet") for name in ("evaluations", "heads")}
    )
    typer.echo(replication.beside_markdown(found))
    if output is not None:
        for name in ("steps", "runs", "heads"):
            write_table(getattr(found, name), output / f"{name}.parquet")
        typer.echo(str(output))
