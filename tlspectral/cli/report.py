"""The command that writes a page about a table of heads: `report`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import TableFile, app, require_writable


@app.command(short_help="one page about a table, for a browser")
def report(
    table: TableFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="HTML file to write.")],
    kernels: Annotated[
        Path | None,
        typer.Option(metavar="KERNELS", help="Parquet file of relative_position_kernel, of heads of the same model."),
    ] = None,
) -> None:
    """Write one page about a table of heads, to open in a browser: it asks nothing of a network.

    Example: tlspectral report heads.parquet -o report.html
    """
    require_writable(output)
    from tlspectral.cli.summary import head_table
    from tlspectral.report import report as write_report
    from tlspectral.tables import read_table

    heads = head_table(read_table(table), table)
    write_report(heads, output, kernels=None if kernels is None else read_table(kernels))
    typer.echo(str(output))
