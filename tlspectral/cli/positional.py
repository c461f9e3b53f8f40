"""The command that scores heads as positional or symbolic: `positional`."""

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
    require_shared,
    require_writable,
    write_figure,
)

if TYPE_CHECKING:
    import pandas as pd

_SCORES = ("exclusion_index", "s_pos", "s_sym")
_ANSWERED = 0.5  # share of the prompts from which heads can be read on a task
_NAMED = 5
_WARNING = (
    "\nwarning: the model does not answer this task. The scores are of its attention on this text, and say nothing of "
    "how it does the task: read heads on tasks that are answered above 0.5"
)


def _print_line(wanted: bool) -> bool:
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
            help="copying, needle, key-value, binding, list-index; or the binding task's wording: plain, gemma-2, "
            "llama-3.2, qwen2.",
        ),
    ] = "copying",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts of your own, a line of JSON each: see --example.")
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", callback=_print_line, is_eager=True, help="Print a line of --prompts.")
    ] = False,
    pairs: Annotated[int | None, typer.Option(min=3, help="Blocks of a prompt; none: the task's own number.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Lists of blocks; errors are over them.")] = 10,
    swaps: Annotated[str, typer.Option(help="kept (without the first block), all or per_query.")] = "kept",
    mode: Annotated[
        str, choice("--mode", ("prompt", "key"), "Words swap, a pass each, or the keys of one pass.")
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
    """Score every head on a block task: does its attention keep its position, or follow the words that swap?

    Example: tlspectral positional smollm2-135m -o out/positional

    Where the model answers the task in half of the prompts or fewer, a warning says so: read heads on tasks that are
    answered. With -o, what was measured is kept in FOLDER/runs, and the same command continues there. `tlspectral
    study positional-figures FOLDER` draws further figures from the tables in FOLDER, and with --table TABLE compares
    the scores with a table of heads.
    """
    require_shared(output, "--output")
    if output is not None:
        require_writable(output / f"heads_{mode}.parquet")
        import_module("tlspectral.plots")  # refuses here where matplotlib is missing, not after the work
    import tlspectral
    from tlspectral.models.reading import attention_view
    from tlspectral.positional import PromptFile
    from tlspectral.positional.ready_tasks import block_task

    if prompts is not None and pairs is not None:
        raise ValueError("--pairs is for a task by name: the lines of --prompts have their own number of blocks")
    given = block_task(task) if prompts is None else PromptFile(str(prompts))
    size: dict[str, Any] = {} if pairs is None else {"n_blocks": pairs}
    asked = replace(given, draws=draws, **size)
    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    view = attention_view(loaded)
    rotary = any(view.rotary(layer) is not None for layer in view.layers)
    say = (lambda text: None) if quiet else typer.echo
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs" if output is None else output / "runs"
        settings: dict[str, Any] = {"mode": mode, "swaps": swaps, "folder": runs, "seed": seed}
        scores = partial(tlspectral.positional_symbolic, loaded, asked, **settings)
        # Parts with frequencies serve the other tables too.
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
        f"answer: mean probability {answers['probability']:.3g}, first of all tokens in {answers['first']:.2f} of the "
        f"prompts; {answers['relative_probability']:.2f} among the choices (a random one: {answers['chance']:.2f})\n"
        f"medians over heads: {'; '.join(medians)}{'' if answered else _WARNING}"
    )


def _named_heads(heads: "pd.DataFrame") -> str:
    """Return the heads at both ends of the exclusion index, with their scores and errors."""
    from tlspectral.tables.printed import printed

    names = ["name", *(one for score in (*_SCORES, "logit_std") for one in (score, f"{score}_se"))]
    ordered = heads.sort_values("exclusion_index", ascending=False).dropna(subset=["exclusion_index"])[names]
    return "\n".join(
        f"{kind} heads by the exclusion index\n{printed(chosen, 2)}"
        for kind, chosen in (("Most positional", ordered.head(_NAMED)), ("Most symbolic", ordered.tail(_NAMED)[::-1]))
    )
