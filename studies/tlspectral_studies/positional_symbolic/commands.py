"""Commands of the study of "Decoupling Positional and Symbolic Attention Behavior" (PS).

`canonical`, `positional-figures`.
"""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import Preset, Shard, TrainedOn, require_writable, write_figure

app = typer.Typer()


@app.command(short_help="train one-head models on tasks with a known answer")
def canonical(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Folder for runs, tables and figures; it is resumed."),
    ],
    preset: Preset = "quick",
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each frequency.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes; the numbers do not depend on it.")] = 1,
    device: TrainedOn = "cpu",
    shard: Shard = None,
) -> None:
    """Train one-head models on the index, retrieval and partial induction tasks at each rotary frequency.

    Example: tlspectral study canonical -o out/canonical --jobs 2
    """
    require_writable(output / "accuracy.parquet")
    from tlspectral.tables import write_table
    from tlspectral_studies.positional_symbolic.canonical import answer_shape, canonical_sweep, query_key_trajectories
    from tlspectral_studies.positional_symbolic.figures import (
        accuracy_against_angle,
        accuracy_against_position,
        accuracy_while_learning,
        query_key_paths,
    )

    sweep = canonical_sweep(preset=preset, seeds=seeds, folder=output / "runs", device=device, n_jobs=jobs)
    trajectories = query_key_trajectories(preset=preset, device=device)
    for name, table in (
        ("accuracy", sweep.accuracy),
        ("by_position", sweep.by_position),
        ("progress", sweep.progress),
        ("answer_shape", answer_shape(sweep.by_position)),
        ("trajectories", trajectories),
    ):
        write_table(table, output / f"{name}.parquet")
    figures = {
        "accuracy_against_angle": accuracy_against_angle(sweep.accuracy),
        "accuracy_against_position": accuracy_against_position(sweep.by_position),
        "accuracy_while_learning": accuracy_while_learning(sweep.progress),
        "trajectories": query_key_paths(trajectories),
    }
    for name, figure in figures.items():
        write_figure(figure, output / f"{name}.png")
    groups = sweep.accuracy.groupby(["task", "n_frequencies", "angle"])["accuracy"]
    shown = groups.agg(lambda values: f"{values.mean():.3f} ({values.std():.3f})").unstack("angle")
    typer.echo(f"Accuracy by base angle (x pi/33): mean and, in brackets, standard deviation over {seeds} seeds")
    typer.echo(shown.to_string())
    index = sweep.accuracy.pivot_table("exclusion_index", ["task", "n_frequencies"], "angle").round(3)
    typer.echo("Exclusion index of these heads: 0 symbolic, 1 positional; mean over seeds")
    typer.echo(index.to_string())
    typer.echo(str(output))


@app.command(short_help="the paper's figures of heads on a block task")
def positional_figures(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder that `tlspectral positional -o FOLDER` has written.")
    ],
    table: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="Table of heads, whose columns the scores are compared with.")
    ] = None,
) -> None:
    """Draw the paper's figures of heads on a block task from the tables of `tlspectral positional`, into their folder.

    Example: tlspectral study positional-figures out/positional --table heads.parquet

    With a table of heads also prints and writes the rank correlations of the scores with its columns.
    """
    from tlspectral.cli.terminal_summary import read_heads
    from tlspectral.tables import read_table, write_table
    from tlspectral_studies.positional_symbolic.agreement import score_agreement
    from tlspectral_studies.positional_symbolic.figures import task_figures

    heads = None if table is None else read_heads(table)
    ways = [way for way in ("prompt", "key") if (folder / f"heads_{way}.parquet").exists()]
    if not ways:
        raise ValueError(f"{folder} holds no heads_prompt.parquet or heads_key.parquet: run tlspectral positional -o")
    for way in ways:
        files = {name: folder / f"{name}_{way}.parquet" for name in ("heads", "queries", "frequencies")}
        tables = {name: read_table(path) for name, path in files.items() if path.exists()}
        if heads is not None:
            tables["agreement"] = agreement = score_agreement(tables["heads"], heads)
            write_table(agreement, folder / f"agreement_{way}.parquet")
            typer.echo(f"Rank correlation with the table of heads, swaps by {way}")
            typer.echo(agreement.round(2).to_string(index=False))
        for name, figure in task_figures(tables, heads).items():
            write_figure(figure, folder / f"{name}_{way}.png")
            typer.echo(str(folder / f"{name}_{way}.png"))
