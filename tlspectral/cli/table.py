"""Commands about a table of heads: `show`, `report`, `plane`, `compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tlspectral.cli.app import (
    FigureOutput,
    TableFile,
    TableOutput,
    app,
    deliver,
    require_table_file,
    require_writable,
    write_figure,
)
from tlspectral.cli.summary import changes, random_heads, read_heads, summary


def _further(function: str) -> Any:
    return typer.Option(metavar="FILE", help=f"Parquet file of {function}, of heads of the same model.")


@app.command(short_help="what stands out in a table")
def show(
    table: TableFile,
    top: Annotated[int, typer.Option(min=1, help="Rows of each list.")] = 5,
) -> None:
    """Print what stands out in a table of heads.

    Example: tlspectral show heads.parquet --top 10
    """
    typer.echo(summary(read_heads(table), top))


@app.command(short_help="one page about a table, for a browser")
def report(
    table: TableFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")],
    kernels: Annotated[list[Path] | None, _further("relative_position_kernel")] = None,
    positional: Annotated[list[Path] | None, _further("positional_symbolic")] = None,
    sweep: Annotated[list[Path] | None, _further("ablation_sweep")] = None,
    edges: Annotated[list[Path] | None, _further("edge_effects")] = None,
    directions: Annotated[list[Path] | None, _further("head_directions")] = None,
) -> None:
    """Write one page about a table of heads, to open in a browser. It loads nothing from a network.

    With further tables of the same model, written by tlspectral.write_table, a head opens into its card, which shows
    what they hold of it. An option may be given several times.

    Example: tlspectral report heads.parquet -o report.html

    Example: tlspectral report heads.parquet -o report.html --kernels kernels.parquet --sweep phase.parquet
    """
    require_writable(output)
    from tlspectral.report import report as write_report
    from tlspectral.tables import read_table

    heads = read_heads(table)
    given = {"kernels": kernels, "positional": positional, "sweep": sweep, "edges": edges,
             "directions": directions}  # fmt: skip
    further = {name: [read_table(path) for path in paths] for name, paths in given.items() if paths}
    write_report(heads, output, **further)
    typer.echo(str(output))


@app.command(short_help="dir_frac against D_head, with the null")
def plane(
    table: TableFile,
    output: FigureOutput,
    highlight: Annotated[int, typer.Option(min=0, help="How many previous-token heads to ring and name.")] = 5,
) -> None:
    """Draw dir_frac against D_head with the null, the strongest previous-token heads ringed.

    Example: tlspectral plane heads.parquet -o plane.png
    """
    require_writable(output)
    from tlspectral.plots import content_direction_plane
    from tlspectral.tables import read_table

    write_figure(content_direction_plane(read_table(table), highlight_previous_token=highlight), output)
    typer.echo(str(output))


@app.command(short_help="which heads differ between two models")
def compare(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Parquet file written by tlspectral.")],
    tuned: Annotated[Path, typer.Argument(metavar="TUNED", help="The same of the changed model.")],
    top: Annotated[int, typer.Option(min=1, help="Heads of each list.")] = 10,
    output: TableOutput = None,
) -> None:
    """Print the heads that differ most between two models of one shape: in behaviour, and in their spectrum.

    Listed are differences of 0.02 or more that noise does not explain.

    Example: tlspectral compare base.parquet tuned.parquet -o comparison.parquet
    """
    require_table_file(output)
    from tlspectral import compare_heads

    first = read_heads(base)
    comparison = compare_heads(first, read_heads(tuned))
    typer.echo("\n".join([changes(comparison, top), *random_heads(first)]))
    deliver(comparison, output, None)
    if output is not None:
        typer.echo(str(output))
