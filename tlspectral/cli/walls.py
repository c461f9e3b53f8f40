"""Walls of heads on the command line: those that `report` measures, and the command `wall`, which draws one."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.ablate import task_of_file
from tlspectral.cli.app import Device, DType, FigureOutput, Model, Revision, app, require_writable, write_figure

if TYPE_CHECKING:
    import pandas as pd

    from tlspectral.tasks import Task

Prompts = Annotated[
    list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A sentence for the wall; may be given again.")
]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="FILE.csv",
        help="Prompts with answers for the wall: columns prompt, correct and wrong, as of ablate --prompts.",
    ),
]
NoRemoval = Annotated[
    bool, typer.Option("--no-removal", help="Do not measure what the answer loses without each head.")
]
Control = Annotated[
    bool,
    typer.Option("--control", help="Compare each change with the other heads of its layer, not the largest 12 alone."),
]


@dataclass(frozen=True)
class WallJob:
    """One wall that is to be measured: a sentence or a task, which the user `asked` for or not."""

    model: Any
    prompt: Any
    task: "Task | None"
    removal: bool
    control: bool
    asked: bool

    def table(self) -> "pd.DataFrame":
        """Measure it."""
        from tlspectral.hooks import wall

        control = "random" if self.control else None
        return wall(self.model, self.prompt, task=self.task, removal=self.removal, control=control).table()

    def check(self) -> None:
        """Refuse, before the long work, a sentence that cannot be read or that the page has no room for. ValueError."""
        from tlspectral.hooks import wall
        from tlspectral.report.wall_section import require_room

        require_room(wall(self.model, self.prompt, task=self.task, removal=False))

    def seconds(self) -> float:
        """Return about how many CPU seconds it takes; 0 without removals."""
        from tlspectral.hooks.head_wall import removal_seconds
        from tlspectral.models.reading import attention_view

        if not self.removal or not attention_view(self.model).causal:
            return 0.0
        return removal_seconds(self.model, self.prompt, task=self.task)


def wall_jobs(
    model: Any, prompts: Sequence[str], task_file: Path | None, *, removal: bool, control: bool
) -> dict[str, WallJob]:
    """Return the walls of sentences and a file of a task by the name of their file; of the first sentences for none."""
    from tlspectral.hooks.head_wall import first_sentences
    from tlspectral.models.running.text import file_text

    asked: list[tuple[Any, Any]] = [(prompt, None) for prompt in prompts]
    if task_file is not None:
        asked.append((None, task_of_file(task_file)))
    jobs: dict[str, WallJob] = {}
    for prompt, task in asked or [(prompt, None) for prompt in first_sentences(model)]:
        said = prompt if isinstance(prompt, str) else None if prompt is None else prompt.tolist()
        known = said if task_file is None or task is None else file_text(task_file)
        identity = json.dumps([known, task is not None, removal, control])
        name = f"wall_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        jobs[name] = WallJob(model, prompt, task, removal, control, bool(asked))
    return jobs


def say_cost(jobs: Sequence[WallJob]) -> None:
    """Print what walls cost, each measured from one pass."""
    seconds = [job.seconds() for job in jobs]
    if any(seconds):
        each = ", ".join(f"about {one:.0f}" if one >= 1 else "under 1" for one in seconds)
        n = len(seconds)
        typer.echo(f"what the answer loses without each head: {each} CPU s, {n} sentence{'s' * (n > 1)}")


@app.command(short_help="all heads on a sentence, and what its answer needs")
def wall(
    model: Model,
    output: FigureOutput,
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="The sentence.")] = None,
    task: TaskFile = None,
    table: Annotated[
        Path | None, typer.Option(metavar="TABLE", help="Table of heads of MODEL, for the frames; none: measured.")
    ] = None,
    no_removal: NoRemoval = False,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
) -> None:
    """Draw the attention of all heads on a sentence, and below each what the answer loses without it.

    Example: tlspectral wall smollm2-135m --prompt "When Mary and John met, John gave a drink to" -o wall.png

    The answer is the model's own next token, or that of --task. A frame says what a head does on random repeated
    tokens. tlspectral report has the same as a page, on which heads can be opened.
    """
    require_writable(output)
    if prompt is not None and task is not None:
        raise typer.BadParameter("the prompts are those of the task: give one of both", param_hint="--prompt")
    asked = None if task is None else task_of_file(task)
    import tlspectral
    from tlspectral import plots
    from tlspectral.cli.terminal_summary import read_heads

    heads = None if table is None else read_heads(table)
    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    write_figure(plots.wall(loaded, prompt, task=asked, table=heads, removal=not no_removal), output)
    typer.echo(str(output))
