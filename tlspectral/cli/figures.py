"""Commands that draw figures from tables: `plane`, `evolution`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import TableFile, app


@app.command()
def plane(
    table: TableFile,
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
def evolution(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the experiments on learnable RoPE.")],
) -> None:
    """Draw what `python -m tlspectral.training.spectral.experiments` found: every figure whose tables are there.

    Example: tlspectral evolution out/spectral
    """
    from tlspectral.plots.headline import headline_paths
    from tlspectral.plots.spectral import depth_manifold_plane, structure_gap_curves, training_losses
    from tlspectral.tables import read_table, whole_file

    wanted = {
        "headline": (headline_paths, ("headline_paths", "headline_runs")),
        "losses": (training_losses, ("losses", "table1")),
        "structure_gap": (structure_gap_curves, ("structure_gap", "table1")),
        "manifold": (depth_manifold_plane, ("manifold",)),
    }
    drawn = 0
    for name, (draw, needed) in wanted.items():
        files = [folder / f"{table}.parquet" for table in needed]
        if all(file.exists() for file in files):
            with whole_file(folder / f"{name}.png") as partial:
                draw(*(read_table(file) for file in files)).savefig(partial, dpi=150)
            typer.echo(str(folder / f"{name}.png"))
            drawn += 1
    if not drawn:
        raise FileNotFoundError(f"{folder} has no tables to draw: run an experiment with -o {folder} first")
