"""The command `report`: one page about a table of heads, or about a model, whose tables it makes first."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import (
    MODEL_HELP,
    Device,
    DType,
    Quiet,
    Revision,
    Shard,
    app,
    keeps,
    require_writable,
)
from tlspectral.cli.prompt_options import task_of_file
from tlspectral.cli.terminal_summary import read_heads
from tlspectral.cli.walls import Control, NoRemoval, Prompts, TaskFile, WallJob, say_cost, wall_jobs

if TYPE_CHECKING:
    import pandas as pd

    from tlspectral.tables.job import JobFailure

STRONGEST = 2
"""Number of strongest heads of each detector whose directions are read in words."""


def _further(function: str) -> Any:
    """Return a typer option for parquet files of a further table; `function` is the function that makes it, for the
    help text.
    """
    return typer.Option(metavar="FILE", help=f"Parquet file of {function} for the same model.")


@app.command(short_help="one page about a model or a table, for a browser")
def report(
    source: Annotated[
        str, typer.Argument(metavar="MODEL|TABLE", help=f"{MODEL_HELP} Or a parquet file written by tlspectral.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER|FILE",
            help="For a model a folder. For a table an HTML file; default: beside the table, as NAME.html.",
        ),
    ] = None,
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
    seed: Annotated[int, typer.Option(help="Seed of a model's nulls, prompts and texts.")] = 0,
    shard: Shard = None,
    quiet: Quiet = False,
) -> None:
    """Write one HTML page about a table of heads, or measure a model and write its tables and page into a folder.

    Example: tlspectral report smollm2-135m -o smollm2

    Example: tlspectral report smollm2-135m -o smollm2 --prompt "Paris is in France, and Rome is in"

    Example: tlspectral report heads.parquet

    Example: tlspectral report heads.parquet -o report.html --kernels kernels.parquet --sweep phase.parquet

    The page is for a browser, and loads nothing from a network. It shows the strongest heads, a grid of heads coloured
    by any column, and a card per head. For a model it begins with walls. A wall is the attention of all heads on one
    sentence and, for each head whose output is set to zero, the change of the probability of the model's own next
    token, or with --task of the task's metric (logit of the correct minus the wrong answer). With eight distinct
    prompts or more, changes have standard errors. The command prints the cost before it begins.

    With further tables of the same model, written by tlspectral.write_table, a click on a head opens its card with its
    rows of these tables. An option may be given several times.

    For a model, FOLDER gets heads, kernels, kernel_prediction, directions (of the two strongest heads of each
    detector), a wall for each sentence and, if the model has a tokenizer, pairs and positional, each as .parquet when
    it is finished; then report.html. A table given as an option is not measured. The same command resumes from FOLDER,
    and refuses a folder of another model or seed. If the head table fails, the command stops. If another table fails,
    the command names it at the end, and the exit status is 1.

    Not shown: why a head looks where it does, or what it does on other text. Other heads may replace a removed head,
    and the largest of many changes are large partly by chance.
    """
    from_table = Path(source).suffix == ".parquet"
    of_walls: dict[str, Any] = {"prompt": prompt, "task": task, "no-removal": no_removal, "control": control}
    chosen = {"device": device, "dtype": dtype, "revision": revision, "seed": seed, **of_walls}
    for option in (name for name, value in chosen.items() if value and from_table):
        raise ValueError(f"--{option} works for a model, but {source} is a table: leave it out")
    for option in (name for name, value in of_walls.items() if value and wall):
        raise ValueError(f"--{option} is for a new wall, but --wall gives a measured one: leave one of them out")
    if output is None:
        if not from_table:
            raise ValueError(f"tables and page of the model {source} need a folder: give -o FOLDER")
        output = Path(source).with_suffix(".html")
    if not from_table and output.suffix == ".html":
        raise ValueError(f"tables and page of the model {source} need a folder: give -o a folder's name, not {output}")
    page = output if from_table else output / "report.html"
    require_writable(page)
    keeps(None if from_table else output)
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
    given_tables: set[str],
    walls: dict[str, WallJob],
    failures: "dict[str, JobFailure]",
    seed: int,
    quiet: bool,
) -> "tuple[pd.DataFrame, dict[str, pd.DataFrame]]":
    """Return (head table, dict from name to walls and other tables) of a model; tables are read from `folder`, or made
    and stored in it.

    `given_tables` are names of tables that are not made. `walls` maps names to jobs that measure all heads on a
    sentence. Errors of tables other than the heads are added to `failures` by name and printed. `quiet=True` does not
    print what will be measured.
    """
    from tlspectral.models.reading import attention_view
    from tlspectral.tables.job import Job, JobFailure, sharing
    from tlspectral.tables.measurement import finished_jobs
    from tlspectral.tables.resume_folder import open_resume_folder

    origin = attention_view(model).origin()
    weights = {name: origin.get(name) for name in ("weights_sha256", "backend")}
    parts = open_resume_folder(folder, {"work": "report", **weights, "seed": seed})
    layers = folder / "layers"
    makers = _makers(model, seed, layers)
    wanted = [name for name in (*makers, "directions", *walls) if name not in given_tables]
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

    # If the head table is finished already, a folder of this name was not made by this run and stays.
    done = remove_layers if "heads" in missing else None
    with sharing(None):  # every shard needs the head table first, so every shard makes it
        heads = made([Job("heads", makers["heads"])], done=done, around=(0, len(wanted) - 1))["heads"]
    makers |= {name: job.table for name, job in walls.items()}
    makers["directions"] = partial(_directions, model, heads, seed)
    tables = made([Job(name, makers[name]) for name in wanted[1:]], failed=failed, around=(1, 0))
    if "kernel_prediction" in tables:
        tables["prediction"] = tables.pop("kernel_prediction")
    return heads, tables


def _makers(model: Any, seed: int, layers: Path) -> "dict[str, Callable[[], pd.DataFrame]]":
    """Return a dict from table name, such as "kernels", to a function without arguments that makes the table;
    `layers` is the folder for finished layers.
    """
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
    """Return the table of `head_directions` (words for singular directions) for the two strongest heads of each
    detector in the head table, for queries and keys and, in decoders, for values.
    """
    import tlspectral
    from tlspectral.models.reading import attention_view
    from tlspectral.tables.measurement import stacked

    strongest = stacked(heads.nlargest(STRONGEST, detector) for detector in ("prev", "dup", "ind"))
    names = strongest.drop_duplicates("name").sort_values(["layer", "head"])["name"]
    kinds = ("qk", "ov") if attention_view(model).causal else ("qk",)
    tables = [tlspectral.head_directions(model, name, kind, seed=seed) for name in names for kind in kinds]
    table = stacked(tables)
    table.attrs = {**tables[0].attrs, **attention_view(model).origin()}
    return table
