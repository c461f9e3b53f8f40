"""The command that draws the plane of D_head and dir_frac: `plane`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import TableFile, app, write_figure


@app.command(short_help="dir_frac against D_head, with the null")
def plane(
    table: TableFile,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Figure: .png, .pdf or .svg.")],
    highlight: Annotated[int, typer.Option(min=0, help="How many previous-token heads to ring and name.")] = 5,
) -> None:
    """Draw dir_frac against D_head with the null, the strongest previous-token heads ringed.

    Example: tlspectral plane heads.parquet -o plane.png
    """
    from tlspectral.plots import content_direction_plane
    from tlspectral.tables import read_table

    write_figure(content_direction_plane(read_table(table), highlight_previous_token=highlight), output)
    typer.echo(str(output))
