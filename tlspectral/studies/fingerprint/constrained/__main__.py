"""`python -m tlspectral.studies.fingerprint.constrained -o FOLDER`: the grid of constrained training, resumable."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tlspectral.errors import TlspectralError
from tlspectral.studies.fingerprint.constrained.grid import constrained_grid
from tlspectral.studies.fingerprint.constrained.presets import ARMS, PRESETS


def main(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for cells and tables.")],
    preset: Annotated[str, typer.Option(help=f"Sizes: {', '.join(sorted(PRESETS))}.")] = "quick",
    arms: Annotated[str, typer.Option(help="Arms, with commas between.")] = ",".join(ARMS),
    seeds: Annotated[int, typer.Option(min=2, help="Seeds per arm.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 1,
) -> None:
    """Train the grid of constrained training, or finish one that was interrupted."""
    command = f"python -m tlspectral.studies.fingerprint.constrained --preset {preset} --arms {arms} --seeds {seeds}"
    try:
        tables = constrained_grid(
            output,
            preset,
            arms=[arm.strip() for arm in arms.split(",")],
            seeds=seeds,
            n_jobs=jobs,
            command=command,
            show_progress=sys.stderr.isatty(),
        )
    except (TlspectralError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    for name, table in tables.items():
        typer.echo(f"{output / name}.parquet: {len(table)} rows")
    for name in ("formation", "table4"):
        typer.echo(tables[name].round(4).to_string(index=False))


if __name__ == "__main__":
    typer.run(main)
