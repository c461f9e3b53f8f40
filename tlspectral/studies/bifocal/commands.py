"""Command of the study of "Bifocal Attention": `evolution`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command(short_help="figures of training with learnable frequencies")
def evolution(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the experiments on learnable RoPE.")],
) -> None:
    """Draw what `python -m tlspectral.studies.bifocal.experiments` found: every figure whose tables are there.

    Example: tlspectral study evolution out/spectral
    """
    import pandas as pd

    from tlspectral.studies.bifocal.figures.headline import headline_paths
    from tlspectral.studies.bifocal.figures.training import (
        depth_manifold_plane,
        phase_evolution,
        resonance_evolution,
        structure_gap_curves,
        training_losses,
    )
    from tlspectral.studies.bifocal.figures.training import evolution as frequency_evolution
    from tlspectral.tables import read_table, whole_file

    wanted = {
        "headline": (headline_paths, ("headline_paths", "headline_runs")),
        "losses": (training_losses, ("losses", "table1")),
        "structure_gap": (structure_gap_curves, ("structure_gap", "table1")),
        "manifold": (depth_manifold_plane, ("manifold",)),
    }
    figures = {}
    for name, (draw, needed) in wanted.items():
        files = [folder / f"{table}.parquet" for table in needed]
        if all(file.exists() for file in files):
            figures[name] = draw(*(read_table(file) for file in files))
    by_language = {
        "frequencies": (frequency_evolution, "trajectories"),
        "resonance": (resonance_evolution, "resonance_steps"),
        "phases": (phase_evolution, "phase_steps"),
    }
    for name, (draw, needed) in by_language.items():
        if not (folder / f"{needed}.parquet").exists():
            continue
        table = read_table(folder / f"{needed}.parquet")
        if needed == "trajectories":  # one run can be drawn: that of frequencies alone, with the first seed
            table = table[(table["arm"] == "omega") & (table["seed"] == table["seed"].min())]
        for language in pd.unique(table["language"]):
            figures[f"{name}_{language}"] = draw(table.loc[table["language"] == language])
    if not figures:
        raise FileNotFoundError(f"{folder} has no tables to draw: run an experiment with -o {folder} first")
    for name, figure in figures.items():
        with whole_file(folder / f"{name}.png") as partial:
            figure.savefig(partial, dpi=150)
        typer.echo(str(folder / f"{name}.png"))
