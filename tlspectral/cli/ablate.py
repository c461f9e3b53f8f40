"""The command `ablate`, which removes a part of some heads."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tlspectral.cli.app import (
    Device,
    DType,
    Folder,
    Format,
    Model,
    Quiet,
    Revision,
    Shard,
    TableOutput,
    app,
    choice,
    deliver,
    keeps,
    listed_heads,
    require_shared,
    require_table_file,
    table_path,
)
from tlspectral.cli.prompt_options import PromptsFile, ReadyTask, require_one_task, task_of_file
from tlspectral.cli.terminal_summary import read_heads

if TYPE_CHECKING:
    import pandas as pd

_OTHER_PREV = 0.1  # only heads with a previous-token score below this are drawn as random other heads
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
        Path | None,
        typer.Argument(metavar="TABLE", help="Table of heads of MODEL; not needed with --heads.", callback=table_path),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="L5H1,L7H2",
            help="Heads, layers (L5), key/value groups (L5KV1), all, or groups (each group as a whole). "
            "Default: the strongest previous-token heads of TABLE.",
        ),
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            help="Part to remove: rope_phase or Im(M_t), symmetric or M_S, antisymmetric or M_A, symmetric_static, "
            "antisymmetric_static, output."
        ),
    ] = "rope_phase",
    at: Annotated[
        str | None,
        typer.Option(
            metavar="S2,-1",
            help="Remove the part at one position at a time: token numbers, or columns of --prompts that hold them.",
        ),
    ] = None,
    task: ReadyTask = None,
    prompts: PromptsFile = None,
    control: Annotated[
        str | None,
        choice(
            "--control",
            ("random",),
            "Also remove random parts of equal size; for output, other heads of the layer; for groups, other groups.",
        ),
    ] = None,
    draws: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Random parts per head (default 5), or other heads of its layer (default all). p = .05 needs 19.",
        ),
    ] = None,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
    output: TableOutput = None,
    form: Format = None,
    folder: Folder = None,
    shard: Shard = None,
    quiet: Quiet = False,
) -> None:
    """Remove a part of one head at a time, and measure the model each time.

    Example: tlspectral ablate smollm2-135m heads.parquet --part rope_phase

    Example: tlspectral ablate smollm2-135m heads.parquet --heads all --folder sweep -o sweep.parquet

    Example: tlspectral ablate smollm2-135m --heads L5H1,L7H2 --part output --prompts names.csv --at S2,-1

    Example: tlspectral ablate smollm2-135m --heads groups --part output --task language -o groups.parquet

    Heads are given by --heads. With --heads groups, each row is a key/value group, all of whose query heads are removed
    together. Without --heads they are the five strongest previous-token heads of TABLE (a table that
    `tlspectral analyze -o` wrote), and random other heads.

    The result is a table with a row per head, and per position with --at. `value` is the measure without the part,
    `delta` the value less the intact value, `delta_se` its standard error over sequences. The measure is the loss of
    --task in nats. With --prompts it is the logit of the correct answer minus the logit of the wrong answer, after each
    prompt; --part output then replaces a head's output by its output on the prompt in the column counterfactual, if the
    file has one. With --control, `control_p` compares delta with random parts. The command prints the 20 heads with the
    greatest harm; -o writes all rows.

    With --heads all and a TABLE, the output ends with a summary: the sum of all effects, the share of small effects,
    and the ranks of the strongest heads. A TABLE of other weights is refused.

    Not shown: whether other heads replace a removed head, and which of many heads would have an effect by chance:
    p-values are not corrected for the number of heads.
    """
    require_table_file(output)
    require_shared(folder, "--folder")
    keeps(folder)
    if heads is None and table is None:
        raise typer.BadParameter(
            "no heads are given: give --heads, or a TABLE whose strongest heads are used", param_hint="--heads"
        )
    require_one_task(prompts, task)
    if control is None and draws is not None:
        raise typer.BadParameter("needs --control random", param_hint="--draws")
    every = heads == "all"
    of_groups = heads == "groups"
    chosen: Any = None if every else heads if of_groups else listed_heads(heads)
    places = None if at is None else [int(place) if re.fullmatch(r"-?\d+", place) else place for place in at.split(",")]
    named_places = [place for place in places or () if isinstance(place, str)]
    if prompts is not None:
        task_of_file(prompts, named_places)  # a file that cannot be read is refused before the model is loaded
    import tlspectral
    from tlspectral.heads.analysis import require_table_of
    from tlspectral.hooks.parts import part_of
    from tlspectral.models.reading import attention_view

    part_of(part)  # an unknown part is refused before the model is loaded
    known = None if table is None else read_heads(table)
    if heads is None and known is not None and table is not None:
        if "prev" not in known or known["prev"].isna().all():
            raise ValueError(
                f"{table} has no detector scores (prev), which choose the heads: give --heads, or make the table again "
                "without --no-detectors"
            )
        chosen = strongest_heads(known, 5)
    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    if known is not None:
        require_table_of(attention_view(loaded), known)
    scored: Any = task or "induction"
    if prompts is not None:
        scored = task_of_file(prompts, named_places, loaded)
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
    """Print the rows of a sweep (effects of removed parts), greatest harm first, at most 20, with detector scores from
    the head table `known`.

    `unit` names the measure, such as "induction loss in nats". `every=True` prints the scores of all detectors,
    otherwise only prev.
    """
    from tlspectral.heads.detectors import DETECTORS
    from tlspectral.tables.printed import printed

    shown = sweep
    detectors: list[str] = []
    of_sets = "sets" in sweep.attrs
    what = "group" if of_sets else "head"
    if known is not None and not of_sets:
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
        f"{sweep['part'].iloc[0]} removed{replaced}, one {what} at a time; value of the {unit} and its change delta "
        f"(intact {sweep.attrs['intact_value']:.3f}); standard errors over {counted} sequences"
    )
    if sweep.attrs.get("control"):
        beside = "other heads of the layer" if sweep["score_rms"].isna().all() else "random parts of equal size"
        drawn = f"{sweep.attrs['draws']} {beside} a head"
        if of_sets:
            drawn = f"the other groups of each group's layer (up to {sweep['control_draws'].map(len).max()})"
        floors = sweep["control_p_floor"]
        least = "unknown: no draw was found"
        if floors.notna().any():
            least = " to ".join(dict.fromkeys(f"{floor:.2g}" for floor in (floors.min(), floors.max())))
        typer.echo(
            f"control: {drawn}; control_excess: |delta| less their mean |effect|; "
            f"control_p: whether delta is one of theirs; the smallest possible is {least}"
        )
    shown = shown.sort_values("delta", ascending=bool(sweep.attrs["higher_is_better"]))[columns]
    if len(shown) > _LISTED:
        typer.echo(f"the {_LISTED} {what}s of {len(shown)} whose removal does the most harm:")
    typer.echo(printed(shown.head(_LISTED).dropna(axis=1, how="all"), 4))


def strongest_heads(heads: "pd.DataFrame", top: int) -> "pd.DataFrame":
    """Return the rows of the head table for the `top` heads with the highest previous-token score `prev`, and for as
    many random heads of their layers with prev < 0.1.
    """
    import pandas as pd

    strongest = heads.nlargest(top, "prev")
    others = heads[heads["layer"].isin(strongest["layer"]) & (heads["prev"] < _OTHER_PREV)]
    return pd.concat([strongest, others.sample(min(top, len(others)), random_state=0)])


def _print_summary(summary: "pd.DataFrame") -> None:
    """Print a line for each statement of `summarize_sweep` about all heads: total effect, share of small effects,
    ranks of heads with p. Other statements are left out.
    """
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
