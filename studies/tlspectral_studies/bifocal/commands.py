"""Commands of the study of "Bifocal Attention": `learn`, `evolution` and `beside-paper`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import Shard, require_writable, write_figure

app = typer.Typer()

_SHOWN = 30  # rows of a table that is short enough for a terminal


@app.command(short_help="train models with learnable rotary positions")
def learn(
    name: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT",
            help="learned-frequency (where one frequency goes), languages (losses on formal languages), memorisation, "
            "structure-gap (depths beyond training), resonance, manifold, equivalence (Dyck-3, twenty seeds), "
            "modulo (sums that are held out), setting (what BA leaves open), setting-learned (arms where more is "
            "learned), longer-context (beside linear, NTK and YaRN scaling), source-code (a pretrained model), or "
            "fine-tuning (its weights too).",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for runs and tables; it is resumed.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="A smoke preset: seconds, and no evidence.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes, one thread each; the numbers do not depend on it.")] = 1,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, cuda:1, mps, ...")] = "cpu",
    shard: Shard = None,
) -> None:
    """Run an experiment on learnable rotary positions, or finish one that was interrupted.

    Example: tlspectral study learn learned-frequency -o out/spectral-demo --jobs 2
    """
    require_writable(output / "tables.parquet")
    from tlspectral.tables import read_table
    from tlspectral_studies.bifocal import (
        code_adaptation,
        context_extension,
        experiments,
        modulo,
        schedule,
        setting_search,
    )

    paths = experiments.run_experiment(
        name,
        output,
        languages=schedule.QUICK if quick else schedule.FULL,
        dyck=schedule.QUICK_DYCK if quick else schedule.DYCK,
        modulo=modulo.QUICK_MODULO if quick else modulo.FULL_MODULO,
        setting=setting_search.QUICK_SETTING if quick else setting_search.FULL_SETTING,
        learned=setting_search.QUICK_SETTING if quick else setting_search.LEARNED_SETTING,
        extension=context_extension.QUICK_EXTENSION if quick else context_extension.FULL_EXTENSION,
        code=code_adaptation.QUICK_CODE if quick else code_adaptation.FULL_CODE,
        backbone=code_adaptation.QUICK_BACKBONE if quick else code_adaptation.FULL_BACKBONE,
        heads=experiments.QUICK_FREQUENCY if quick else experiments.FULL_FREQUENCY,
        n_jobs=jobs,
        device=device,
        command=f"tlspectral study learn {name}" + " --quick" * quick + f" --device {device}" * (device != "cpu"),
    )
    for path in paths:
        table = read_table(path)
        typer.echo(f"{path}: {len(table)} rows")
        if len(table) <= _SHOWN:
            typer.echo(table.round(4).to_string(index=False))


@app.command(short_help="figures of training with learnable frequencies")
def evolution(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the experiments on learnable RoPE.")],
) -> None:
    """Draw the tables of `tlspectral study learn`: every figure whose tables are there.

    Example: tlspectral study evolution out/spectral
    """
    import pandas as pd

    from tlspectral.tables import read_table
    from tlspectral_studies.bifocal.figures import (
        depth_manifold_plane,
        frequency_paths,
        phase_evolution,
        position_losses,
        resonance_evolution,
        setting_losses,
        structure_gap_curves,
        training_losses,
    )
    from tlspectral_studies.bifocal.figures import evolution as frequency_evolution

    wanted = {
        "learned_frequency": (frequency_paths, ("headline_paths", "headline_runs")),
        "losses": (training_losses, ("losses", "table1")),
        "structure_gap": (structure_gap_curves, ("structure_gap", "table1")),
        "longer_context": (position_losses, ("extension_positions",)),
        "manifold": (depth_manifold_plane, ("manifold",)),
        "setting": (setting_losses, ("setting_search",)),
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
        raise FileNotFoundError(
            f"{folder} has no tables to draw: run `tlspectral study learn EXPERIMENT -o {folder}` first"
        )
    for name, figure in figures.items():
        write_figure(figure, folder / f"{name}.png", dpi=150)
        typer.echo(str(folder / f"{name}.png"))


@app.command(short_help="losses and resonance beside the paper's")
def beside_paper(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the experiments on learnable RoPE.")],
) -> None:
    """Print the losses of "Bifocal Attention" beside the tables of experiments on formal languages.

    Example: tlspectral study beside-paper docs/results/spectral

    Nothing is trained. A language on which no arm is below chance is said to have no power.
    """
    from tlspectral_studies.bifocal import beside_paper as tables

    typer.echo(tables.beside_paper(folder))
