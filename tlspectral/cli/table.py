"""Commands about a table of heads: `show`, `compare`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import (
    TableFile,
    TableOutput,
    app,
    deliver,
    require_table_file,
)
from tlspectral.cli.terminal_summary import changes, random_heads, read_heads, summary


@app.command(short_help="what stands out in a table")
def show(
    table: TableFile,
    top: Annotated[int, typer.Option(min=1, help="Rows of each list.")] = 5,
) -> None:
    """Print what stands out in a table of heads.

    Example: tlspectral show heads.parquet --top 10
    """
    typer.echo(summary(read_heads(table), top))


@app.command(short_help="which heads differ between two models")
def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Parquet file written by tlspectral.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The same of the changed model.")],
    top: Annotated[int, typer.Option(min=1, help="Heads of each list.")] = 10,
    output: TableOutput = None,
) -> None:
    """Print the heads that differ most between two models of one shape: in behaviour, and in their spectrum.

    Example: tlspectral compare base.parquet tuned.parquet -o comparison.parquet

    Listed are differences of 0.02 or more that noise does not explain.
    """
    require_table_file(output)
    from tlspectral import compare_heads

    first = read_heads(base)
    comparison = compare_heads(first, read_heads(tuned))
    typer.echo("\n".join([changes(comparison, top), *random_heads(first)]))
    deliver(comparison, output, None)
    if output is not None:
        typer.echo(str(output))
