"""Commands that draw tables (`plane`, `map`, `effects`, `circuit`) or heads (`patterns`, `eigenvalues`, `kernel`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tlspectral.cli.app import (
    Device,
    DType,
    FigureOutput,
    Model,
    Revision,
    TableFile,
    app,
    listed_heads,
    require_writable,
    write_figure,
)

HeadNames = Annotated[
    str, typer.Argument(metavar="HEADS", help="Heads or layers such as L5H1,L6H9 or L3; at most 12 heads.")
]


def _drawn(figure: Any, output: Path) -> None:
    """Write a figure and print its path."""
    write_figure(figure, output)
    typer.echo(str(output))


def _draw_heads(
    draw: Callable[[Any, Any], Any],
    output: Path,
    model: str,
    heads: str,
    *,
    device: str | None,
    dtype: str | None,
    revision: str | None,
) -> None:
    """Load a model, and write the figure that `draw(model, heads)` returns. Head names are checked before the model is
    loaded.
    """
    require_writable(output)
    chosen = listed_heads(heads)
    import tlspectral

    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    _drawn(draw(loaded, chosen), output)


@app.command(short_help="directional against rotational share, with the null")
def plane(
    table: TableFile,
    output: FigureOutput,
    highlight: Annotated[
        int, typer.Option(min=0, help="Number of strongest previous-token heads that get a ring and a name.")
    ] = 5,
) -> None:
    """Draw every head by directional share (dir_frac) and rotational share (D_head), with the null.

    Example: tlspectral plane heads.parquet -o plane.png

    The strongest previous-token heads get a ring and their name.
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.plane(read_table(table), highlight_previous_token=highlight), output)


@app.command("map", short_help="a column of a table, layer by head")
def column_map(
    table: TableFile,
    column: Annotated[str, typer.Argument(metavar="COLUMN", help="Column to draw, such as D_head_z, prev or copying.")],
    output: FigureOutput,
) -> None:
    """Draw one column of a table as a map, layers down and heads across, with the three largest heads named.

    Example: tlspectral map heads.parquet D_head_z -o map.png
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.heads(read_table(table), column), output)


@app.command(short_help="effects of a sweep beside their controls")
def effects(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="Table that `tlspectral ablate -o` wrote.")],
    table: TableFile,
    output: FigureOutput,
) -> None:
    """Draw the effect of every head of a sweep with its error, beside every draw of its control.

    Example: tlspectral effects sweep.parquet heads.parquet -o effects.png
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.ablation_effects(read_table(sweep), detectors=read_table(table)), output)


@app.command(short_help="edges as a graph or a matrix")
def circuit(
    edges: Annotated[Path, typer.Argument(metavar="EDGES", help="Table of edge_effects, written by write_table.")],
    output: FigureOutput,
    most: Annotated[int, typer.Option(min=1, help="Number of largest edges to draw; 25 or more are a matrix.")] = 24,
) -> None:
    """Draw the largest edges: a graph from the embedding to the logits, or a matrix of senders and receivers.

    Example: tlspectral circuit edges.parquet -o circuit.png
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.circuit(read_table(edges), most=most), output)


@app.command(short_help="where heads look on a prompt")
def patterns(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text, at most 128 tokens.")],
    heads: HeadNames,
    output: FigureOutput,
    sink: Annotated[bool, typer.Option("--sink", help="Draw the first key too; most heads look at it.")] = False,
    sinks: Annotated[
        str | None,
        typer.Option(
            metavar="found", help="found: leave out every attention sink of the layer instead of the first key."
        ),
    ] = None,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
) -> None:
    """Draw the attention of heads on a prompt, side by side, queries down and keys across.

    Example: tlspectral patterns smollm2-135m "When Mary and John went out, John met" L5H1,L16H0 -o patterns.png
    """
    if sinks is not None:
        from tlspectral.heads.detectors.sinks import asked_for_sinks

        asked_for_sinks(sinks, sink=sink)  # checks the options before the model is loaded

    def draw(loaded: Any, chosen: Any) -> Any:
        from tlspectral import plots

        return plots.patterns(loaded, prompt, chosen, sink=sink, sinks=sinks)

    _draw_heads(draw, output, model, heads, device=device, dtype=dtype, revision=revision)


@app.command(short_help="eigenvalues over those of the null")
def eigenvalues(
    model: Model,
    heads: HeadNames,
    output: FigureOutput,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
) -> None:
    """Draw the eigenvalues of heads' query-key matrices in the complex plane, over 30 draws of their null.

    Example: tlspectral eigenvalues smollm2-135m L5H1,L16H0 -o eigenvalues.png
    """

    def draw(loaded: Any, chosen: Any) -> Any:
        from tlspectral import plots

        return plots.eigenvalues(loaded, chosen)

    _draw_heads(draw, output, model, heads, device=device, dtype=dtype, revision=revision)


@app.command(short_help="which distance a head prefers")
def kernel(
    model: Model,
    heads: HeadNames,
    output: FigureOutput,
    device: Device = None,
    dtype: DType = None,
    revision: Revision = None,
) -> None:
    """Draw the mean attention score of heads by the distance of the key.

    Example: tlspectral kernel smollm2-135m L5H1,L16H0 -o kernel.png
    """

    def draw(loaded: Any, chosen: Any) -> Any:
        from tlspectral import plots, relative_position_kernel

        return plots.kernel(relative_position_kernel(loaded, chosen))

    _draw_heads(draw, output, model, heads, device=device, dtype=dtype, revision=revision)
