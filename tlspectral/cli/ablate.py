"""The command that removes a part of some heads: `ablate`."""

from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import (
    Device,
    DType,
    Format,
    Model,
    Quiet,
    Revision,
    Shard,
    TableOutput,
    app,
    choice,
    deliver,
    listed_heads,
    require_shared,
    require_table_file,
)
from tlspectral.cli.summary import read_heads, require_detectors

if TYPE_CHECKING:
    import pandas as pd

_OTHER_PREV = 0.1  # only heads below it are sampled as other heads
_LISTED = 20
_STATEMENTS = {
    "sum": "sum of the effects of all heads",
    "share_small": "share of heads with an effect below 0.01 nats",
    "detector_rank": "rank by {column} of {note}, which does the most harm",
    "effect_rank": "rank by harm of {note}, the strongest by {column}",
}


@app.command(short_help="what removing a part of some heads costs")
def ablate(
    model: Model,
    table: Annotated[
        Path | None, typer.Argument(metavar="TABLE", help="Table of heads of MODEL; not needed with --heads.")
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(metavar="L5H1,L7H2", help="These, L5 (a layer), or all, in place of the strongest of TABLE."),
    ] = None,
    part: Annotated[
        str, typer.Option(help="rope_phase, symmetric, antisymmetric, output or long_range; or Im(M_t), M_S, M_A.")
    ] = "rope_phase",
    window: Annotated[
        int | None, typer.Option(min=1, help="With long_range: how many of the last tokens a head still sees.")
    ] = None,
    sinks: Annotated[int, typer.Option(min=0, help="With long_range: first tokens that a head still sees.")] = 0,
    task: Annotated[
        str | None,
        choice(
            "--task", ("induction", "language"), "Repeated random tokens (without it and --prompts), or packaged text."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt per line, or a .csv with the columns prompt and, if they differ, correct, wrong; with "
            "counterfactual too, --part output puts in what a head writes on that.",
        ),
    ] = None,
    correct: Annotated[str | None, typer.Option(help='Right answer to all prompts, one token such as " Mary".')] = None,
    wrong: Annotated[str | None, typer.Option(help="Wrong answer to all prompts, one token.")] = None,
    control: Annotated[
        str | None,
        choice(
            "--control",
            ("random",),
            "Also remove random parts of equal size; of output and long_range, other heads.",
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Random parts per head (5), or other heads of its layer (all). p needs 19 for .05."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Strongest previous-token heads of TABLE.")] = 5,
    matched: Annotated[int, typer.Option(min=0, help="Random other heads of the same layers.")] = 5,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    output: TableOutput = None,
    form: Format = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep finished layers here, and go on from them.")
    ] = None,
    shard: Shard = None,
    quiet: Quiet = False,
    seed: Annotated[int, typer.Option(help="Seed of the random heads and of the sequences.")] = 0,
) -> None:
    """Remove a part of one head at a time, and score the model each time.

    The heads are those of --heads, or the strongest previous-token heads of TABLE with random heads beside them. A
    TABLE of other weights is refused. With --prompts the score is the logit of the correct answer less that of the
    wrong one, after each prompt; else it is the loss of --task. With --heads all and a TABLE the sweep is summarised:
    the sum of all effects, the share of small ones, and where the strongest heads stand.

    Example: tlspectral ablate smollm2-135m heads.parquet --part rope_phase

    Example: tlspectral ablate smollm2-135m heads.parquet --heads all --folder sweep -o sweep.parquet

    Example: tlspectral ablate smollm2-135m --heads L5H1,L7H2 --prompts names.txt --correct " Mary" --wrong " John"
    """
    require_table_file(output)
    require_shared(folder, "--folder")
    if heads is None and table is None:
        raise typer.BadParameter("give heads, or a TABLE whose strongest heads are meant", param_hint="--heads")
    if prompts is not None and task is not None:
        raise typer.BadParameter("the prompts are the task: give one of --task and --prompts", param_hint="--task")
    if prompts is None and (correct, wrong) != (None, None):
        raise typer.BadParameter("--correct and --wrong are answers to --prompts", param_hint="--prompts")
    if control is None and draws is not None:
        raise typer.BadParameter("is of --control random: give that too", param_hint="--draws")
    if (part == "long_range") != (window is not None):
        raise typer.BadParameter("goes with --part long_range, which needs it", param_hint="--window")
    every = heads == "all"
    chosen: Any = None if every else listed_heads(heads)
    answered = None if prompts is None else _prompts(prompts, correct, wrong)
    import tlspectral
    from tlspectral.heads.same_model import require_table_of
    from tlspectral.hooks.parts import LongRange, Output, part_of

    removed: Any = part if window is None else LongRange(window, sinks)
    if part == "output" and answered is not None and answered[1] is not None:
        removed = Output(replace="counterfactual")
    part_of(removed)  # an unknown part is refused before the model is loaded
    known = None if table is None else read_heads(table)
    if heads is None and known is not None and table is not None:
        require_detectors(known, table)
        chosen = strongest_heads(known, top, matched, seed)
    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    if known is not None:
        require_table_of(loaded, known)
    scored: Any = (
        task or "induction"
        if answered is None
        else tlspectral.logit_difference(*answered[0], counterfactual=answered[1])
    )
    sweep = tlspectral.ablation_sweep(
        loaded,
        removed,
        heads=chosen,
        task=scored,
        control=control,  # type: ignore[arg-type]
        draws=draws,
        folder=folder,
        seed=seed,
    )
    deliver(sweep, output, form)
    if form is not None or quiet:
        return
    echo_sweep(sweep, known, f"{sweep.attrs['task']} loss in nats" if answered is None else sweep.attrs["task"], every)
    if every and known is not None and answered is None:
        _print_summary(tlspectral.hooks.summarize_sweep(sweep, known))


def echo_sweep(sweep: "pd.DataFrame", known: "pd.DataFrame | None", unit: str, every: bool = False) -> None:
    """Print the heads of a sweep, the greatest harm first, beside the detectors of their head table."""
    from tlspectral.heads.detectors import DETECTORS

    shown = sweep
    detectors: list[str] = []
    if known is not None:
        detectors = [name for name in (DETECTORS if every else ["prev"]) if name in known]
        shown = shown.merge(known[["layer", "head", *detectors]], on=["layer", "head"])
    columns = ["name", *detectors, *sweep.columns.drop(["layer", "head", "name", "part"])]
    typer.echo(
        f"{sweep['part'].iloc[0]} removed, one head at a time; value of the {unit} and its change delta (intact "
        f"{sweep.attrs['intact_value']:.3f}); standard errors over {sweep.attrs['n_sequences']} sequences"
    )
    if sweep.attrs.get("control"):
        beside = "other heads of the layer" if sweep["score_rms"].isna().all() else "random parts of equal size"
        typer.echo(
            f"control: {sweep.attrs['draws']} {beside} a head; control_excess: |delta| less their mean |effect|; "
            f"control_p: whether delta is one of theirs, no finer than {1 / (1 + sweep.attrs['draws']):.2g}"
        )
    shown = shown.sort_values("delta", ascending=bool(sweep.attrs["higher_is_better"]))[columns]
    if len(shown) > _LISTED:
        typer.echo(f"the {_LISTED} heads of {len(shown)} whose removal does the most harm:")
    typer.echo(shown.head(_LISTED).round(4).to_string(index=False))


def strongest_heads(heads: "pd.DataFrame", top: int, matched: int, seed: int) -> "pd.DataFrame":
    """Return the strongest previous-token heads, and random other heads of their layers."""
    import pandas as pd

    strongest = heads.nlargest(top, "prev")
    others = heads[heads["layer"].isin(strongest["layer"]) & (heads["prev"] < _OTHER_PREV)]
    return pd.concat([strongest, others.sample(min(matched, len(others)), random_state=seed)])


def _print_summary(summary: "pd.DataFrame") -> None:
    """Print the statements about all heads, a line each; rank correlations are left to `summarize_sweep`."""
    for row in summary[summary["size_control"] == "none"].itertuples():
        statement = str(row.statement)
        if statement not in _STATEMENTS:
            continue
        text = _STATEMENTS[statement].format(column=row.column, note=row.note)
        if "rank" in statement:
            typer.echo(f"{text}: {row.value:.0f} of {row.n}, p = {row.pvalue:.3g}")
        else:
            typer.echo(f"{text}: {row.value:.3f} ({row.low:.3f} to {row.high:.3f})")


def _prompts(path: Path, correct: str | None, wrong: str | None) -> tuple[tuple[list[str], Any, Any], list[str] | None]:
    """Return the prompts of a file with the correct and the wrong answer of all or of each, and their pairs or None.

    Raises:
        ValueError: no text in UTF-8, no CSV, no prompt, an empty cell, or answers that are missing or given twice.
    """
    from tlspectral.models.text import file_text

    text = StringIO(file_text(path), newline=None)
    columns: dict[str, list[str]]
    known = ("prompt", "counterfactual", "correct", "wrong")
    if path.suffix.lower() == ".csv":
        import pandas as pd

        try:
            frame = pd.read_csv(text, dtype=str, keep_default_na=False)
        except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
            raise ValueError(
                f"{path} cannot be read as CSV: found {' '.join(str(error).split())}; expected a first line with the "
                "column prompt and, if they differ, correct and wrong, as many cells in each line, and closed quotes"
            ) from error
        columns = {str(name): frame[name].tolist() for name in frame if name in known}
        found = f"a .csv with {len(frame)} rows and the columns {', '.join(map(str, frame)) or 'none'}"
    else:
        columns = {"prompt": [line.rstrip("\n") for line in text if line.strip()]}
        found = "no line with text"
    if not columns.get("prompt"):
        raise ValueError(
            f"{path} holds no prompt: write one per line, or a .csv with a column prompt and a row per prompt; found "
            f"{found}"
        )
    for name, cells in columns.items():
        if "" in cells:
            raise ValueError(f"{path}, row {cells.index('') + 1}: {name} is empty")
    answers = []
    for name, given in (("correct", correct), ("wrong", wrong)):
        if (given is None) == (name not in columns):
            raise ValueError(
                f"the {name} answers are {'missing' if given is None else 'given twice'}: give --{name}, or a column "
                f"{name} in a .csv of --prompts, and one of the two"
            )
        answers.append(given if given is not None else columns[name])
    return (columns["prompt"], answers[0], answers[1]), columns.get("counterfactual")
