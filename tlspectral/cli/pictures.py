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

HeadNames = Annotated[str, typer.Argument(metavar="HEADS", help="As L5H1,L6H9 or L3, at most 12.")]


def _drawn(figure: Any, output: Path) -> None:
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
    """Load a model and write the figure that `draw` makes of it and the heads, which are read before it is loaded."""
    require_writable(output)
    chosen = listed_heads(heads)
    import tlspectral

    loaded = tlspectral.load_model(model, revision=revision, device=device, dtype=dtype)
    _drawn(draw(loaded, chosen), output)


@app.command(short_help="directional against rotational share, with the null")
def plane(
    table: TableFile,
    output: FigureOutput,
    highlight: Annotated[int, typer.Option(min=0, help="How many previous-token heads to ring and name.")] = 5,
) -> None:
    """Draw directional share (dir_frac) against rotational share (D_head), the null, and rings around heads by prev.

    Example: tlspectral plane heads.parquet -o plane.png
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.plane(read_table(table), highlight_previous_token=highlight), output)


@app.command("map", short_help="a column of a table, layer by head")
def column_map(
    table: TableFile,
    column: Annotated[str, typer.Argument(metavar="COLUMN", help="As D_head_z, prev or copying.")],
    output: FigureOutput,
) -> None:
    """Draw one column of a table, layers down and heads across, the three largest named.

    Example: tlspectral map heads.parquet D_head_z -o map.png
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.heads(read_table(table), column), output)


@app.command(short_help="what ablate measured, beside its control")
def effects(
    sweep: Annotated[Path, typer.Argument(metavar="SWEEP", help="Table that `tlspectral ablate -o` wrote.")],
    table: TableFile,
    output: FigureOutput,
) -> None:
    """Draw the effect of every head of a sweep, with its error, beside every draw of the control.

    Example: tlspectral effects sweep.parquet heads.parquet -o effects.png
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.ablation_effects(read_table(sweep), detectors=read_table(table)), output)


@app.command(short_help="edges as a graph or a matrix")
def circuit(
    edges: Annotated[Path, typer.Argument(metavar="EDGES", help="Table that write_table wrote of edge_effects.")],
    output: FigureOutput,
    most: Annotated[int, typer.Option(min=1, help="The largest edges; from 25 on they are a matrix.")] = 24,
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
    sink: Annotated[bool, typer.Option("--sink", help="Draw the first key too, at which most heads look.")] = False,
    sinks: Annotated[
        str | None, typer.Option(metavar="found", help="found: leave out every sink of the layer, not the first key.")
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

        asked_for_sinks(sinks, sink=sink)  # in front of loading

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
    """Draw the eigenvalues of heads in the complex plane, over the eigenvalues of 30 draws of their null.

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
