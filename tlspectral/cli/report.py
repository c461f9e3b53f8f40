"""The command `report`: one page about a table of heads, or about a model, whose tables it makes."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.ablate import task_of_file
from tlspectral.cli.app import (
    MODEL_HELP,
    Device,
    DType,
    Quiet,
    Revision,
    Shard,
    app,
    require_writable,
)
from tlspectral.cli.terminal_summary import read_heads
from tlspectral.cli.walls import Control, NoRemoval, Prompts, TaskFile, WallJob, say_cost, wall_jobs

if TYPE_CHECKING:
    import pandas as pd

    from tlspectral.tables.job import JobFailure

STRONGEST = 2
"""Heads of each detector whose directions are read."""


def _further(function: str) -> Any:
    return typer.Option(metavar="FILE", help=f"Parquet file of {function}, of heads of the same model.")


@app.command(short_help="one page about a model or a table, for a browser")
def report(
    source: Annotated[
        str, typer.Argument(metavar="MODEL|TABLE", help=f"{MODEL_HELP} Or a parquet file written by tlspectral.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER|FILE", help="Folder of a model, HTML file of a table.")
    ],
    pairs: Annotated[list[Path] | None, _further("top_pairs")] = None,
    kernels: Annotated[list[Path] | None, _further("relative_position_kernel")] = None,
    positional: Annotated[list[Path] | None, _further("positional_symbolic")] = None,
    sweep: Annotated[list[Path] | None, _further("ablation_sweep")] = None,
    edges: Annotated[list[Path] | None, _further("edge_effects")] = None,
    directions: Annotated[list[Path] | None, _further("head_directions")] = None,
    wall: Annotated[list[Path] | None, _further("hooks.wall(...).table()")] = None,
    prompt: Prompts = None,
    task: TaskFile = None,
    no_removal: NoRemoval = False,
    control: Control = False,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    seed: Annotated[int, typer.Option(help="Of a model's nulls, prompts and texts.")] = 0,
    shard: Shard = None,
    quiet: Quiet = False,
) -> None:
    """Write one page about a table of heads, or measure a model and write its tables and page into a folder.

    Example: tlspectral report smollm2-135m -o smollm2

    Example: tlspectral report smollm2-135m -o smollm2 --prompt "Paris is in France, and Rome is in"

    Example: tlspectral report heads.parquet -o report.html --kernels kernels.parquet --sweep phase.parquet

    The page begins with the wall of a model: all heads on a sentence, and what the answer loses without each. The
    answer is the model's own next token, or that of --task: from eight prompts on, changes have standard errors. The
    command says what that costs before it begins.

    The page is for a browser, and loads nothing from a network. With further tables of the same model, written by
    tlspectral.write_table, a head opens into its card, which shows what they hold of it. An option may be given several
    times.

    For a model FOLDER gets heads, kernels, kernel_prediction, directions (of the two strongest heads of each detector),
    a wall for each sentence and, for a model with a tokenizer, pairs and positional, each as .parquet when it is
    finished; then report.html. What is given as an option is not measured. The same command continues there, and
    refuses a folder of another model or seed.
    Without a head table the command stops. Any other table that cannot be made of this model is named at the end, and
    the exit status is then 1.
    """
    from_table = Path(source).suffix == ".parquet"
    of_walls: dict[str, Any] = {"prompt": prompt, "task": task, "no-removal": no_removal, "control": control}
    chosen = {"device": device, "dtype": dtype, "revision": revision, "seed": seed, **of_walls}
    for option in (name for name, value in chosen.items() if value and from_table):
        raise ValueError(f"--{option} is for a model, and {source} is a table: leave it out")
    for option in (name for name, value in of_walls.items() if value and wall):
        raise ValueError(f"--{option} is for a wall that is measured, and --wall gives one: leave one of them out")
    if not from_table and output.suffix == ".html":
        raise ValueError(f"{source} is measured into a folder, with its page: give -o a folder's name")
    page = output if from_table else output / "report.html"
    require_writable(page)
    import tlspectral
    from tlspectral.hooks.measured_wall import wall_of_table
    from tlspectral.report import report as write_report
    from tlspectral.tables import read_table

    if task is not None:
        task_of_file(task)  # a file that cannot be read is refused before the model is loaded
    walls = [read_table(path) for path in wall or ()]
    given: dict[str, list[Path] | None] = {"pairs": pairs, "kernels": kernels}
    given |= {"positional": positional, "sweep": sweep, "edges": edges, "directions": directions}
    further: dict[str, Any] = {name: [read_table(path) for path in paths] for name, paths in given.items() if paths}
    failures: dict[str, JobFailure] = {}
    if from_table:
        heads = read_heads(Path(source))
    else:
        loaded = tlspectral.load_model(source, revision=revision, device=device, dtype=dtype)
        jobs = {} if walls else wall_jobs(loaded, prompt or (), task, removal=not no_removal, control=control)
        heads, measured = _measured(loaded, output, set(further), jobs, failures, seed, quiet)
        walls += [measured.pop(name) for name in jobs if name in measured]
        further |= measured
    write_report(heads, page, walls=list(map(wall_of_table, walls)), **further)
    if not quiet:
        typer.echo(str(page))
    if failures:
        raise typer.Exit(1)


def _measured(
    model: Any,
    folder: Path,
    given: set[str],
    walls: dict[str, WallJob],
    failures: "dict[str, JobFailure]",
    seed: int,
    quiet: bool,
) -> "tuple[pd.DataFrame, dict[str, pd.DataFrame]]":
    """Return the heads of a model, its walls and other tables but those that are given; note what could not be made."""
    from tlspectral.models.reading import attention_view
    from tlspectral.tables.job import Job, JobFailure, sharing
    from tlspectral.tables.measurement import finished_jobs
    from tlspectral.tables.resume_folder import open_resume_folder

    origin = attention_view(model).origin()
    weights = {name: origin.get(name) for name in ("weights_sha256", "backend")}
    parts = open_resume_folder(folder, {"work": "report", **weights, "seed": seed})
    layers = folder / "layers"
    makers = _makers(model, seed, layers)
    wanted = [name for name in (*makers, "directions", *walls) if name not in given]
    missing = [name for name in wanted if not (folder / f"{name}.parquet").exists()]

    def failed(name: str, failure: JobFailure) -> None:
        failures[name] = failure
        typer.echo(f"no {name}: {failure.error}: {' '.join(failure.message.split())}", err=True)

    for name in (name for name in missing if name in walls):
        try:
            walls[name].check()
        except Exception as error:
            if walls[name].asked:
                raise
            failed(name, JobFailure.of_error(error))
    wanted, missing = ([name for name in names if name not in failures] for names in (wanted, missing))
    if not quiet:
        typer.echo(f"to measure: {', '.join(missing)}" if missing else "all tables are there")
        say_cost([job for name, job in walls.items() if name in missing])
    made = partial(finished_jobs, folder=parts, description="report", unit="table")

    def remove_layers(name: str) -> None:
        shutil.rmtree(layers, ignore_errors=True)

    # A folder of this name beside a finished table is not ours.
    done = remove_layers if "heads" in missing else None
    with sharing(None):  # every shard needs them first
        heads = made([Job("heads", makers["heads"])], done=done)["heads"]
    makers |= {name: job.table for name, job in walls.items()}
    makers["directions"] = partial(_directions, model, heads, seed)
    tables = made([Job(name, makers[name]) for name in wanted[1:]], failed=failed)
    if "kernel_prediction" in tables:
        tables["prediction"] = tables.pop("kernel_prediction")
    return heads, tables


def _makers(model: Any, seed: int, layers: Path) -> "dict[str, Callable[[], pd.DataFrame]]":
    """Return what makes each table of a model alone; `layers` keeps finished layers of the heads meanwhile."""
    import tlspectral
    from tlspectral.heads import kernel_prediction
    from tlspectral.positional import BindingTask

    makers: dict[str, Callable[[], pd.DataFrame]] = {
        "heads": partial(tlspectral.analyze_heads, model, seed=seed, folder=layers),
        "kernels": partial(tlspectral.relative_position_kernel, model),
        "kernel_prediction": partial(kernel_prediction, model),
    }
    if getattr(model, "tokenizer", None) is not None:
        makers["pairs"] = partial(tlspectral.top_pairs, model)
        task = BindingTask("plain", 16, queries=3, draws=2)
        makers["positional"] = partial(tlspectral.positional_symbolic, model, task, seed=seed)
    return makers


def _directions(model: Any, heads: "pd.DataFrame", seed: int) -> "pd.DataFrame":
    """Return the directions of the strongest heads of each detector, of queries with keys and of values."""
    import tlspectral
    from tlspectral.models.reading import attention_view
    from tlspectral.tables.measurement import stacked

    strongest = stacked(heads.nlargest(STRONGEST, detector) for detector in ("prev", "dup", "ind"))
    names = strongest.drop_duplicates("name").sort_values(["layer", "head"])["name"]
    kinds = ("qk", "ov") if attention_view(model).causal else ("qk",)
    found = [tlspectral.head_directions(model, name, kind, seed=seed) for name in names for kind in kinds]
    table = stacked(found)
    table.attrs = {**found[0].attrs, **attention_view(model).origin()}
    return table
