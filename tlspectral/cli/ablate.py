"""The command that removes a part of some heads: `ablate`."""

import re
from collections.abc import Sequence
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
from tlspectral.cli.terminal_summary import read_heads

if TYPE_CHECKING:
    import pandas as pd

    from tlspectral.tasks import Task

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
        str,
        typer.Option(
            help="rope_phase, symmetric, antisymmetric or output; or Im(M_t), M_S, M_A; or symmetric_static, "
            "antisymmetric_static."
        ),
    ] = "rope_phase",
    at: Annotated[
        str | None,
        typer.Option(
            metavar="S2,-1",
            help="Remove it at each of these alone: tokens by number, or columns of --prompts with one.",
        ),
    ] = None,
    task: Annotated[
        str | None,
        choice(
            "--task", ("induction", "language"), "Repeated random tokens (without it and --prompts), or packaged text."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Columns prompt, correct and wrong: the answers are one token each, such as ' Mary'; with "
            "counterfactual too, --part output puts in what a head writes on that.",
        ),
    ] = None,
    control: Annotated[
        str | None,
        choice(
            "--control",
            ("random",),
            "Also remove random parts of equal size; of output, other heads.",
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(min=1, help="Random parts per head (5), or other heads of its layer (all). p needs 19 for .05."),
    ] = None,
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
) -> None:
    """Remove a part of one head at a time, and score the model each time.

    The heads are given by --heads, or are the five strongest previous-token heads of TABLE with random heads beside
    them. A TABLE of other weights is refused. With --prompts the score is the logit of the correct answer less the
    logit of the wrong one, after each prompt; else it is the loss of --task. With --heads all and a TABLE the sweep is
    summarised: the sum of all effects, the share of small ones, and where the strongest heads stand. With --at there is
    a row per head and position.

    Example: tlspectral ablate smollm2-135m heads.parquet --part rope_phase

    Example: tlspectral ablate smollm2-135m heads.parquet --heads all --folder sweep -o sweep.parquet

    Example: tlspectral ablate smollm2-135m --heads L5H1,L7H2 --part output --prompts names.csv --at S2,-1
    """
    require_table_file(output)
    require_shared(folder, "--folder")
    if heads is None and table is None:
        raise typer.BadParameter("give heads, or a TABLE whose strongest heads are meant", param_hint="--heads")
    if prompts is not None and task is not None:
        raise typer.BadParameter("the prompts are the task: give one of --task and --prompts", param_hint="--task")
    if control is None and draws is not None:
        raise typer.BadParameter("is of --control random: give that too", param_hint="--draws")
    every = heads == "all"
    chosen: Any = None if every else listed_heads(heads)
    places = None if at is None else [int(one) if re.fullmatch(r"-?\d+", one) else one for one in at.split(",")]
    scored: Any = task or "induction"
    if prompts is not None:
        scored = task_of_file(prompts, [one for one in places or () if isinstance(one, str)])
    import tlspectral
    from tlspectral.heads.analysis import require_table_of
    from tlspectral.hooks.parts import part_of
    from tlspectral.models.reading import attention_view

    part_of(part)  # an unknown part is refused before the model is loaded
    known = None if table is None else read_heads(table)
    if heads is None and known is not None and table is not None:
        if "prev" not in known or known["prev"].isna().all():
            raise ValueError(f"{table} has no detector scores (prev): make it again without --no-detectors")
        chosen = strongest_heads(known, 5)
    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    if known is not None:
        require_table_of(attention_view(loaded), known)
    sweep = tlspectral.ablation_sweep(
        loaded,
        part,  # type: ignore[arg-type]
        heads=chosen,
        task=scored,
        at=places,
        control=control,  # type: ignore[arg-type]
        draws=draws,
        folder=folder,
    )
    deliver(sweep, output, form)
    if form is not None or quiet:
        return
    echo_sweep(sweep, known, f"{sweep.attrs['task']} loss in nats" if prompts is None else sweep.attrs["task"], every)
    if every and known is not None and prompts is None and places is None:
        _print_summary(tlspectral.hooks.summarize_sweep(sweep, known))


def echo_sweep(sweep: "pd.DataFrame", known: "pd.DataFrame | None", unit: str, every: bool = False) -> None:
    """Print the heads of a sweep, the greatest harm first, beside the detectors of their head table."""
    from tlspectral.heads.detectors import DETECTORS
    from tlspectral.tables.printed import printed

    shown = sweep
    detectors: list[str] = []
    if known is not None:
        detectors = [name for name in (DETECTORS if every else ["prev"]) if name in known]
        shown = shown.merge(known[["layer", "head", *detectors]], on=["layer", "head"])
    columns = [
        "name",
        *detectors,
        *sweep.columns.drop(["layer", "head", "name", "part", "control_draws"], errors="ignore"),
    ]
    n, notes = sweep.attrs["n_sequences"], sweep.attrs.get("prompt_notes", {})
    counted = f"{notes['distinct_rows']} distinct of {n}" if "distinct_rows" in notes else n
    replaced = f" ({sweep.attrs['replace']})" if "replace" in sweep.attrs else ""
    typer.echo(
        f"{sweep['part'].iloc[0]} removed{replaced}, one head at a time; value of the {unit} and its change delta "
        f"(intact {sweep.attrs['intact_value']:.3f}); standard errors over {counted} sequences"
    )
    if sweep.attrs.get("control"):
        beside = "other heads of the layer" if sweep["score_rms"].isna().all() else "random parts of equal size"
        typer.echo(
            f"control: {sweep.attrs['draws']} {beside} a head; control_excess: |delta| less their mean |effect|; "
            f"control_p: whether delta is one of theirs; the smallest possible is {_floors(sweep['control_p_floor'])}"
        )
    shown = shown.sort_values("delta", ascending=bool(sweep.attrs["higher_is_better"]))[columns]
    if len(shown) > _LISTED:
        typer.echo(f"the {_LISTED} heads of {len(shown)} whose removal does the most harm:")
    typer.echo(printed(shown.head(_LISTED).dropna(axis=1, how="all"), 4))


def _floors(floors: "pd.Series") -> str:
    """Return the smallest possible p of all heads, and how it differs between them."""
    if floors.isna().all():
        return "unknown: no draw was found"
    return " to ".join(dict.fromkeys(f"{floor:.2g}" for floor in (floors.min(), floors.max())))


def strongest_heads(heads: "pd.DataFrame", top: int) -> "pd.DataFrame":
    """Return the strongest previous-token heads, and as many random other heads of their layers."""
    import pandas as pd

    strongest = heads.nlargest(top, "prev")
    others = heads[heads["layer"].isin(strongest["layer"]) & (heads["prev"] < _OTHER_PREV)]
    return pd.concat([strongest, others.sample(min(top, len(others)), random_state=0)])


def _print_summary(summary: "pd.DataFrame") -> None:
    """Print the statements about all heads, a line each; rank correlations are left to `summarize_sweep`."""
    for row in summary[summary["size_control"] == "none"].itertuples():
        statement = str(row.statement)
        if statement not in _STATEMENTS:
            continue
        text = _STATEMENTS[statement].format(column=row.column, note=row.note)
        if "rank" in statement:
            least = f"smallest possible {row.pvalue_floor:.3g}"
            typer.echo(f"{text}: {row.value:.0f} of {row.n}, p = {row.pvalue:.3g} ({least})")
        else:
            typer.echo(f"{text}: {row.value:.3f} ({row.low:.3f} to {row.high:.3f})")


def task_of_file(path: Path, places: Sequence[str] = ()) -> "Task":
    """Return the task of a file of prompts and answers, with the positions of which the columns are named."""
    import pandas as pd

    from tlspectral.errors import did_you_mean
    from tlspectral.models.running.text import file_text
    from tlspectral.tables.schema import require
    from tlspectral.tasks import logit_difference

    try:
        frame = pd.read_csv(StringIO(file_text(path), newline=None), dtype=str, keep_default_na=False)
    except (pd.errors.EmptyDataError, pd.errors.ParserError) as error:
        raise ValueError(
            f"{path} cannot be read as CSV: found {' '.join(str(error).split())}; expected a first line with the "
            "columns prompt, correct and wrong, as many cells in each line, and closed quotes"
        ) from error
    needed = ["prompt", "correct", "wrong", *places]
    require(frame, needed, f"a row per prompt, with the columns {', '.join(needed)}", name=f"table in {path}")
    known = (*needed, "counterfactual")
    for name in frame:
        if name not in known and (meant := did_you_mean(str(name), known)):
            raise ValueError(f"{path} has a column {name!r}, which is not used{meant}")
    columns = {name: frame[name].tolist() for name in known if name in frame}
    for name, cells in columns.items():
        if "" in cells:
            raise ValueError(f"{path}, row {cells.index('') + 1}: {name} is empty")
    for name in places:
        wrong = [cell for cell in columns[name] if not re.fullmatch(r"-?\d+", cell)]
        if wrong:
            raise ValueError(f"{path}: {name} is the number of a token in each prompt; found {wrong[0]!r}")
    return logit_difference(
        columns["prompt"],
        columns["correct"],
        columns["wrong"],
        counterfactual=columns.get("counterfactual"),
        positions={name: [int(cell) for cell in columns[name]] for name in places},
    )
