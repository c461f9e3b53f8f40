"""Walls on the command line: the walls that `report` measures, and the command `wall`, which draws one."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import (
    Device,
    DType,
    FigureOutput,
    Model,
    Revision,
    app,
    require_writable,
    table_path,
    write_figure,
)
from tlspectral.cli.prompt_options import read_prompt, task_of_file

if TYPE_CHECKING:
    import pandas as pd

    from tlspectral.tasks import Task

Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        metavar="TEXT",
        help="A sentence for the wall (token ids such as 5,6,7 without a tokenizer); may be repeated.",
    ),
]
TaskFile = Annotated[
    Path | None,
    typer.Option(
        "--task",
        metavar="FILE.csv",
        help="Prompts with answers for the wall: columns prompt, correct and wrong, as for ablate --prompts.",
    ),
]
NoRemoval = Annotated[bool, typer.Option("--no-removal", help="Do not measure the answer's loss without each head.")]
Control = Annotated[
    bool,
    typer.Option("--control", help="Compare every change with other heads of its layer, not only the largest 12."),
]


@dataclass(frozen=True)
class WallJob:
    """A wall to be measured: attention of all heads on a sentence (or on a task's first prompt), and the change of the
    answer without each head.

    model: the loaded model. prompt: text or token ids, None with a task. task: prompts with answers, or None. removal:
    whether the answer is measured without each head. control: whether every change is compared with other heads of its
    layer. asked: whether the user gave this sentence or task.
    """

    model: Any
    prompt: Any
    task: "Task | None"
    removal: bool
    control: bool
    asked: bool

    def table(self) -> "pd.DataFrame":
        """Measure the wall, and return it as a DataFrame with a row per head: attention, and effects of removing the
        head.
        """
        from tlspectral.hooks import wall

        control = "random" if self.control else None
        return wall(self.model, self.prompt, task=self.task, removal=self.removal, control=control).table()

    def check(self) -> None:
        """Raise an error, before the long work, if the sentence cannot be read or is too long for the page."""
        from tlspectral.hooks import wall
        from tlspectral.report.wall_section import require_room

        require_room(wall(self.model, self.prompt, task=self.task, removal=False))

    def seconds(self) -> float:
        """Return an estimate of the CPU seconds that measuring without each head takes; 0 if no head is removed."""
        from tlspectral.hooks.head_wall import removal_seconds
        from tlspectral.models.reading import attention_view

        if not self.removal or not attention_view(self.model).causal:
            return 0.0
        return removal_seconds(self.model, self.prompt, task=self.task)


def wall_jobs(
    model: Any, prompts: Sequence[str], task_file: Path | None, *, removal: bool, control: bool
) -> dict[str, WallJob]:
    """Return a dict from file name to `WallJob`, one per sentence and one for the task file; if neither is given, for
    the default sentences.

    A wall is the attention of all heads on a sentence, and the change of the answer without each head. `removal=False`
    leaves the changes out; `control=True` compares every change with other heads of its layer.
    """
    from tlspectral.hooks.head_wall import first_sentences
    from tlspectral.models.running.text import file_text

    asked: list[tuple[Any, Any]] = [(read_prompt(model, prompt), None) for prompt in prompts]
    if task_file is not None:
        asked.append((None, task_of_file(task_file, model=model)))
    jobs: dict[str, WallJob] = {}
    for prompt, task in asked or [(prompt, None) for prompt in first_sentences(model)]:
        prompt_text = prompt if isinstance(prompt, str) else None if prompt is None else prompt.tolist()
        content = prompt_text if task_file is None or task is None else file_text(task_file)
        identity = json.dumps([content, task is not None, removal, control])
        name = f"wall_{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        jobs[name] = WallJob(model, prompt, task, removal, control, bool(asked))
    return jobs


def say_cost(jobs: Sequence[WallJob]) -> None:
    """Print how many CPU seconds measuring each sentence without each head will take, estimated from one run of
    each; print nothing if no head is removed.
    """
    seconds = [job.seconds() for job in jobs]
    if any(seconds):
        each = ", ".join(f"about {cost:.0f}" if cost >= 1 else "under 1" for cost in seconds)
        n = len(seconds)
        typer.echo(f"what the answer loses without each head: {each} CPU s, {n} sentence{'s' * (n > 1)}")


@app.command(short_help="all heads on a sentence, and the answer without each")
def wall(
    model: Model,
    output: FigureOutput,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="The sentence; token ids such as 5,6,7 without a tokenizer."),
    ] = None,
    task: TaskFile = None,
    table: Annotated[
        Path | None,
        typer.Option(
            metavar="TABLE",
            help="Table of heads of MODEL, for the frames. Default: measure the heads.",
            callback=table_path,
        ),
    ] = None,
    no_removal: NoRemoval = False,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
) -> None:
    """Draw the attention of all heads on a sentence, with a bar for the change of the answer without each head.

    Example: tlspectral wall smollm2-135m --prompt "When Mary and John met, John gave a drink to" -o wall.png

    The figure has a square per head: queries down, keys across, colour the attention probability. The bar below is the
    change when the head's output is set to zero: of the probability of the model's own next token, or of the metric of
    --task. A frame shows the head's kind on random repeated tokens. `tlspectral report` makes the same as a page, on
    which a click opens a head.

    Not shown: where a head looks on other sentences, or whether other heads replace it.
    """
    require_writable(output)
    if prompt is not None and task is not None:
        raise typer.BadParameter("--task has prompts of its own: give only one of them", param_hint="--prompt")
    if task is not None:
        task_of_file(task)  # a file that cannot be read is refused before the model is loaded
    import tlspectral
    from tlspectral import plots
    from tlspectral.cli.terminal_summary import read_heads

    heads = None if table is None else read_heads(table)
    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    asked = None if task is None else task_of_file(task, model=loaded)
    shown = None if prompt is None else read_prompt(loaded, prompt)
    write_figure(plots.wall(loaded, shown, task=asked, table=heads, removal=not no_removal), output)
    typer.echo(str(output))
