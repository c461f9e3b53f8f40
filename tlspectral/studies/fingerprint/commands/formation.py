"""The command that draws constrained training: `formation`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.studies.fingerprint.commands.app import app


@app.command(short_help="figure of constrained training")
def formation(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a grid of constrained training.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Figure: .png, .pdf or .svg.")],
) -> None:
    """Draw what `python -m tlspectral.studies.fingerprint.constrained` found: curves, times, dissociation, kernels.

    Example: tlspectral study formation out/constrained -o formation.png
    """
    from tlspectral.studies.fingerprint.figures import formation as draw
    from tlspectral.tables import read_table, whole_file

    tables = [read_table(folder / f"{name}.parquet") for name in ("evaluations", "formation", "rerouting", "kernels")]
    with whole_file(output) as partial:
        draw(*tables).savefig(partial, dpi=200)
    typer.echo(str(output))
