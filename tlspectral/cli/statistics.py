"""The command that puts a model beside the published ones: `statistics`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import MODEL_HELP, TableFile, app, require_writable


@app.command(short_help="the row of the paper's Tables 2 and 3, for a model")
def statistics(
    table: TableFile,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help=f"Also placebos and the rounding of weights. {MODEL_HELP}"),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Previous-token heads, an odd number.")] = 5,
    seed: Annotated[int, typer.Option(help="Of resamples, placebos and perturbations.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The table, as parquet.")
    ] = None,
) -> None:
    """Print the row that Tables 2 and 3 of "Fingerprint, Not Blueprint" would have for a model, with intervals.

    Example: tlspectral statistics heads.parquet --model smollm2-135m
    """
    if output is not None:
        require_writable(output)
    from tlspectral.cli.summary import head_table
    from tlspectral.heads.model_statistics import another_model
    from tlspectral.tables import read_table, write_table

    heads = head_table(read_table(table), table)
    loaded = None
    if model is not None:
        from tlspectral import load_model

        loaded = load_model(model)
    found = another_model(heads, model=loaded, k=top, seed=seed, show_progress=True)
    shown = found.drop(columns=["function", "pvalue_of", "reason"]).round(3)
    typer.echo(shown.to_string(index=False, na_rep=""))
    typer.echo("")
    for row in found.to_dict(orient="records"):
        name = f"{row['statistic']} ({row['method']})"
        if row["pvalue"] == row["pvalue"]:
            typer.echo(f"p of {name}: {row['pvalue']:.4f}: {row['pvalue_of']}")
        if row["reason"]:
            typer.echo(f"{name}: {row['reason']}")
    if output is not None:
        write_table(found, output)
        typer.echo(str(output))
