"""The command that compares previous-token heads between positional schemes: `schemes`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tlspectral.cli.app import require_writable
from tlspectral.cli.summary import head_table
from tlspectral.studies.fingerprint.commands.app import app

if TYPE_CHECKING:
    import pandas as pd

_PUBLISHED = "published:"


@app.command(short_help="previous-token heads of several models side by side")
def schemes(
    tables: Annotated[
        list[str],
        typer.Argument(metavar="TABLE...", help="Tables of heads, or published ones such as published:gpt2."),
    ],
    top: Annotated[int, typer.Option(min=1, help="Previous-token heads per model.")] = 5,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Figure: .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Compare where the strongest previous-token heads of models stand by D_head, with rotary positions and without.

    Example: tlspectral study schemes heads.parquet published:gpt2 published:pythia-410m -o compare.png
    """
    if output is not None:
        require_writable(output)
    from tlspectral.studies.fingerprint.replication import scheme_contrast

    contrast = scheme_contrast(_named(tables), k=top)
    shown = contrast.models.sort_values("percentile", kind="stable", ascending=False)
    typer.echo(f"Percentile of D_head within the model, median of the top {top} previous-token heads")
    typer.echo(shown.drop(columns="k").round(3).to_string(index=False))
    test = contrast.test
    if test is None:
        only = contrast.models["scheme"].iloc[0]
        typer.echo(f"All models are {only}: no test between rotary positions and others")
    else:
        apart = f"separated by {test.gap:.3f}" if test.separated else f"overlap by {-test.gap:.3f}"
        typer.echo(
            f"RoPE against the rest, {test.n} models: {apart}; exact permutation p = {test.pvalue:.3f}, one-sided, "
            f"smallest possible {test.floor:.3f}"
        )
    if output is not None:
        from tlspectral.studies.fingerprint.figures.replication import scheme_percentiles
        from tlspectral.tables import whole_file

        with whole_file(output) as partial:
            scheme_percentiles(contrast).savefig(partial, dpi=200)
        typer.echo(str(output))


def _named(tables: list[str]) -> "dict[str, pd.DataFrame]":
    """The tables by the name of their model; a name that comes twice is followed by the file's."""
    from tlspectral.tables import read_table
    from tlspectral.tables.published import published_heads

    again = [given for place, given in enumerate(tables) if given in tables[:place]]
    if again:
        raise ValueError(f"{again[0]} is named twice, and would count as two models")
    named: dict[str, pd.DataFrame] = {}
    for given in tables:
        if given.startswith(_PUBLISHED):
            name, table = given, published_heads(given.removeprefix(_PUBLISHED))
        else:
            path = Path(given)
            table = head_table(read_table(path), path)
            name = str(table.attrs.get("model") or path.stem)
            name = f"{name} ({given})" if name in named else name
        named[name] = table
    return named
