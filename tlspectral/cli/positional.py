"""The command `positional`, which scores heads as positional or symbolic."""

import tempfile
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import (
    Device,
    DType,
    Model,
    Quiet,
    Revision,
    Shard,
    app,
    choice,
    keeps,
    require_shared,
    require_writable,
    write_figure,
)

if TYPE_CHECKING:
    import pandas as pd

_SCORES = ("exclusion_index", "s_pos", "s_sym")
_ANSWERED = 0.5  # a task counts as answered if the model is right on a larger share of the prompts
_NAMED = 5
_WARNING = (
    "\nwarning: the model does not answer this task. The scores describe its attention on this text, not how it solves "
    "the task: use a task that it answers in more than 0.5 of the prompts"
)


def _print_line(wanted: bool) -> bool:
    """If `wanted` (--example was given), print an example line for a file of --prompts and exit; otherwise return
    False.
    """
    if wanted:
        from tlspectral.positional.ready_tasks import LINE

        typer.echo(LINE)
        raise typer.Exit
    return wanted


@app.command(short_help="does a head look at a place or at a word?")
def positional(
    model: Model,
    task: Annotated[
        str,
        typer.Option(
            "--task",
            "--template",
            help="copying, needle, key-value, binding, list-index; or a wording of the binding task: plain, gemma-2, "
            "llama-3.2, qwen2.",
        ),
    ] = "copying",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Your own prompts, one line of JSON each: see --example.")
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", callback=_print_line, is_eager=True, help="Print a line of --prompts.")
    ] = False,
    pairs: Annotated[
        int | None, typer.Option(min=3, help="Blocks of a prompt. Default: the number of the task.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Number of random lists of blocks; errors are over lists.")] = 10,
    swaps: Annotated[str, typer.Option(help="Blocks that swap: kept (all but the first), all or per_query.")] = "kept",
    mode: Annotated[
        str,
        choice("--mode", ("prompt", "key"), "prompt: swap words and run the model again. key: swap keys of one run."),
    ] = "prompt",
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Folder for tables and figures.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the lists.")] = 0,
    shard: Shard = None,
    quiet: Quiet = False,
) -> None:
    """Score every head on a task of blocks: when two blocks of a prompt swap, does its attention keep its position, or
    follow the words?

    Example: tlspectral positional smollm2-135m -o out/positional

    A block is one entry of a list in the prompt, such as a name with its object. Each head gets a positional score
    s_pos (cosine, 1: attention stays at its positions), a symbolic score s_sym (cosine, 1: it follows the blocks) and
    an exclusion index (0 symbolic, 1 positional). The command prints medians over heads and the five heads at both
    ends. With -o it writes tables by head, query, list of blocks and rotary frequency as .parquet, and two figures.

    If the model answers the task in half of the prompts or fewer, a warning says so: use a task that the model answers.
    With -o, finished measurements are kept in FOLDER/runs, and the same command resumes from them. `tlspectral study
    positional-figures FOLDER` draws further figures from the tables in FOLDER; with --table TABLE it compares the
    scores with a table of heads.

    Not shown: whether the answer depends on a head, or how the head behaves on other text.
    """
    require_shared(output, "--output")
    keeps(None if output is None else output / "runs")
    if output is not None:
        require_writable(output / f"heads_{mode}.parquet")
        import_module("tlspectral.plots")  # raises here if matplotlib is missing, not after the work
    import tlspectral
    from tlspectral.models.reading import attention_view
    from tlspectral.positional import PromptFile
    from tlspectral.positional.ready_tasks import block_task

    if prompts is not None and pairs is not None:
        raise ValueError(
            "--pairs works with --task, because the lines of --prompts have their own number of blocks: leave it out"
        )
    base_task = block_task(task) if prompts is None else PromptFile(str(prompts))
    size: dict[str, Any] = {} if pairs is None else {"n_blocks": pairs}
    full_task = replace(base_task, draws=draws, **size)
    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    view = attention_view(loaded)
    rotary = any(view.rotary(layer) is not None for layer in view.layers)
    say = (lambda text: None) if quiet else typer.echo
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs" if output is None else output / "runs"
        settings: dict[str, Any] = {"mode": mode, "swaps": swaps, "folder": runs, "seed": seed}
        scores = partial(tlspectral.positional_symbolic, loaded, full_task, **settings)
        # The frequencies come first, because their stored jobs serve the other tables too.
        tables = {"frequencies": scores(per_frequency=True)} if rotary else {}
        tables |= {"heads": scores(), "queries": scores(by="query"), "draws": scores(by="draw")}
    say(_scores_text(tables["heads"], tables["draws"]) + "\n")
    say(_named_heads(tables["heads"]) + "\n")
    if output is not None:
        for name, frame in tables.items():
            tlspectral.write_table(frame, output / f"{name}_{mode}.parquet")
        write_figure(tlspectral.plots.positional_symbolic_plane(tables["heads"]), output / f"plane_{mode}.png")
        write_figure(tlspectral.plots.exclusion_plane(tables["heads"]), output / f"exclusion_plane_{mode}.png")
        say(str(output))


def _scores_text(heads: "pd.DataFrame", by_list: "pd.DataFrame") -> str:
    """Return three or four lines about a run: task and settings, how often the model answers, and medians of the scores
    over heads.

    `heads` is a table of `positional_symbolic` by head, `by_list` the same by list of blocks, for the range of the
    medians.
    """
    from tlspectral.tables.printed import short_number

    about, answers = heads.attrs, heads.attrs["answers"]
    of_lists = by_list.groupby("draw")[list(_SCORES)].median()
    medians = (
        f"{name} {heads[name].median():.2f} ({of_lists[name].min():.2f} to {of_lists[name].max():.2f} by list)"
        for name in _SCORES
    )
    answered = answers["first"] > _ANSWERED
    return (
        f"{about['task']} on {about['model']}, swaps {about['swaps']} by {about['mode']}, "
        f"draws: {about['draws']}\n"
        f"answer: mean probability {short_number(answers['probability'])}, first of all tokens in "
        f"{answers['first']:.2f} of the prompts; {answers['relative_probability']:.2f} among the choices (a random "
        f"one: {answers['chance']:.2f})\n"
        f"medians over heads: {'; '.join(medians)}{'' if answered else _WARNING}"
    )


def _named_heads(heads: "pd.DataFrame") -> str:
    """Return text with the five most positional and the five most symbolic heads by the exclusion index: scores and
    standard errors.

    `heads` is a table of `positional_symbolic` by head.
    """
    from tlspectral.tables.printed import printed

    names = ["name", *(column for score in (*_SCORES, "logit_std") for column in (score, f"{score}_se"))]
    ordered = heads.sort_values("exclusion_index", ascending=False).dropna(subset=["exclusion_index"])[names]
    return "\n".join(
        f"{kind} heads by the exclusion index\n{printed(chosen, 2)}"
        for kind, chosen in (("Most positional", ordered.head(_NAMED)), ("Most symbolic", ordered.tail(_NAMED)[::-1]))
    )
