"""The command that removes a part of some heads: `ablate`."""

from pathlib import Path
from typing import Annotated

import typer

from tlspectral.cli.app import MODEL_HELP, Revision, TableFile, app, require_writable
from tlspectral.cli.summary import head_table, require_detectors

_OTHER_PREV = 0.1  # only heads below it are sampled as other heads


@app.command(short_help="what removing a part of previous-token heads costs")
def ablate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)],
    table: TableFile,
    part: Annotated[str, typer.Option(help="rope_phase, symmetric, antisymmetric or output.")] = "rope_phase",
    task: Annotated[
        str, typer.Option(help="induction (random repeated tokens) or language (packaged text).")
    ] = "induction",
    top: Annotated[int, typer.Option(min=1, help="Strongest previous-token heads of TABLE.")] = 5,
    matched: Annotated[int, typer.Option(min=0, help="Random other heads of the same layers.")] = 5,
    revision: Revision = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Parquet file to write; none: only print.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random heads and of the sequences.")] = 0,
) -> None:
    """Remove a part of the strongest previous-token heads, one head at a time, and of random heads beside them.

    TABLE is of MODEL: a table of other weights is refused.

    Example: tlspectral ablate smollm2-135m heads.parquet --part rope_phase
    """
    if output is not None:
        require_writable(output)
    import pandas as pd

    import tlspectral
    from tlspectral.heads.same_model import require_table_of
    from tlspectral.tables import read_table

    heads = head_table(read_table(table), table)
    require_detectors(heads, table)
    strongest = heads.nlargest(top, "prev")
    others = heads[heads["layer"].isin(strongest["layer"]) & (heads["prev"] < _OTHER_PREV)]
    chosen = pd.concat([strongest, others.sample(min(matched, len(others)), random_state=seed)])
    loaded = tlspectral.load_model(model, revision=revision)
    require_table_of(loaded, heads)
    sweep = tlspectral.ablation_sweep(loaded, part, heads=chosen, task=task, seed=seed)  # type: ignore[arg-type]
    if output is not None:
        tlspectral.write_table(sweep, output)
    shown = sweep.merge(heads[["layer", "head", "name", "prev"]], on=["layer", "head"])
    shown = shown.sort_values("delta", ascending=False)[
        ["name", "prev", "delta", "delta_stderr", "delta_p", "score_rms"]
    ]
    intact = float((sweep["value"] - sweep["delta"]).iloc[0])
    typer.echo(
        f"{part} removed, one head at a time; change of the {task} loss in nats (intact {intact:.3f}); "
        "standard errors over sequences"
    )
    typer.echo(shown.round(3).to_string(index=False))
