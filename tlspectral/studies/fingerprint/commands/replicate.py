"""The command that recomputes published numbers: `replicate`."""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlspectral.cli.app import require_writable
from tlspectral.studies.fingerprint.commands.app import app

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = ("where", "what", "published", "ours", "why")


@app.command(short_help="published numbers, computed again")
def replicate(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for the table and the figures.")
    ] = None,
    grid: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE", help="formation.parquet of your own constrained grid, shown beside the published."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also print the rows that were reproduced.")] = False,
) -> None:
    """Recompute the numbers of "Fingerprint, Not Blueprint" from its published tables, and say which differ and why.

    Example: tlspectral study replicate -o out/replication
    """
    if output is not None:
        require_writable(output / "replication.parquet")
    from tlspectral.studies.fingerprint import replication
    from tlspectral.tables import read_table, write_table

    own = None if grid is None else replication.side_by_side(read_table(grid))
    began = time.perf_counter()
    table = replication.replicate()
    seconds = time.perf_counter() - began
    for verdict in (name for name in replication.VERDICTS if every or name != replication.VERDICTS[0]):
        rows = table.loc[table["verdict"] == verdict]
        typer.echo(f"{verdict}: {len(rows)}")
        for where, what, published, ours, why in zip(*(rows[name] for name in _SHOWN), strict=True):
            here = "" if math.isnan(ours) else f", here {ours:.4g}"
            typer.echo(f"  {where}: {what}: printed {published}{here}" + (f"\n      {why}" if why else ""))
        typer.echo("")
    if own is not None:
        typer.echo(
            "Formation in steps, over runs that formed: published, and your grid by the loss and by both criteria"
        )
        typer.echo(own.round(2).to_string(index=False) + "\n")
    typer.echo(_counts(table, seconds))
    if output is not None:
        from tlspectral.studies.fingerprint.figures.replication import published_figures
        from tlspectral.tables import whole_file

        write_table(table, output / "replication.parquet")
        with whole_file(output / "replication.md") as partial:
            partial.write_text(replication.markdown(table), encoding="utf-8")
        for name, figure in published_figures().items():
            with whole_file(output / f"{name}.png") as partial:
                figure.savefig(partial, dpi=200)
        typer.echo(str(output))


def _counts(table: "pd.DataFrame", seconds: float) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in table.attrs["verdicts"].items())
    return f"{len(table)} published numbers in {seconds:.0f} s: {counts}"
