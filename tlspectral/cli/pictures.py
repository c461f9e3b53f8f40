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
    table_path,
    write_figure,
)
from tlspectral.cli.prompt_options import read_prompt

HeadNames = Annotated[
    str, typer.Argument(metavar="HEADS", help="Heads or layers such as L5H1,L6H9 or L3; at most 12 heads.")
]


def _drawn(figure: Any, output: Path) -> None:
    """Write a matplotlib figure to the file `output`, and print its path."""
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
    """Load the model named `model`, call `draw(model, heads)`, and write the figure that it returns to the file
    `output`.

    `heads` is a text such as "L5H1,L6H9", which is checked before the model is loaded. `device`, `dtype` and `revision`
    are passed to `load_model`.
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

    TABLE is written by `tlspectral analyze -o`. The figure has a dot per head, coloured by layer; both axes are shares
    from 0 to 1, and a band shows random directions. The strongest previous-token heads get a ring and their name.

    Not shown: what a head does; its place shows how its weights are arranged.
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

    TABLE is written by `tlspectral analyze -o`. The figure has a cell per head; colour is the column's value in its
    unit.

    Not shown: whether a named head is unusual; the largest of many heads is large by chance too.
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.heads(read_table(table), column), output)


@app.command(short_help="effects of a sweep beside their controls")
def effects(
    sweep: Annotated[
        Path, typer.Argument(metavar="SWEEP", help="Table that `tlspectral ablate -o` wrote.", callback=table_path)
    ],
    table: TableFile,
    output: FigureOutput,
) -> None:
    """Draw the effect of every head of a sweep with its error, next to the effects of its controls.

    Example: tlspectral effects sweep.parquet heads.parquet -o effects.png

    SWEEP is written by `tlspectral ablate -o`, TABLE by `tlspectral analyze -o`; heads are labelled with their
    previous-token score from TABLE. A row per head shows the change of the measure without the part (nats for a loss),
    its standard error and, if the sweep had --control random, the change by each random part.

    Not shown: effects that survive a correction for the number of heads.
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.ablation_effects(read_table(sweep), detectors=read_table(table)), output)


@app.command(short_help="edges as a graph or a matrix")
def circuit(
    edges: Annotated[
        Path, typer.Argument(metavar="EDGES", help="Table that `tlspectral edges -o` wrote.", callback=table_path)
    ],
    output: FigureOutput,
    most: Annotated[int, typer.Option(min=1, help="Number of largest edges to draw; 25 or more are a matrix.")] = 24,
) -> None:
    """Draw the largest edges: a graph from the embedding to the logits, or a matrix of senders and receivers.

    Example: tlspectral circuit edges.parquet -o circuit.png

    EDGES is written by `tlspectral edges -o`, or by tls.write_table(tls.edge_effects(model, ...), FILE). Line width or
    colour is the change of the metric when the edge is cut, in the metric's unit.

    Not shown: whether other edges matter, or what the drawn edges do together; see `tls.faithfulness`.
    """
    require_writable(output)
    from tlspectral import plots
    from tlspectral.tables import read_table

    _drawn(plots.circuit(read_table(edges), most=most), output)


@app.command(short_help="where heads look on a prompt")
def patterns(
    model: Model,
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help="Text of at most 128 tokens. Without a tokenizer, token ids such as 5,6,7."
        ),
    ],
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

    The figure has a panel per head; colour is the attention probability. The first key is left out by default.

    Not shown: where the heads look on other prompts.
    """
    if sinks is not None:
        from tlspectral.heads.detectors.sinks import asked_for_sinks

        asked_for_sinks(sinks, sink=sink)  # checks the options before the model is loaded

    def draw(loaded: Any, chosen: Any) -> Any:
        from tlspectral import plots

        return plots.patterns(loaded, read_prompt(loaded, prompt), chosen, sink=sink, sinks=sinks)

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
    """Draw the eigenvalues of heads' query-key matrices in the complex plane, over 30 random matrices with the same
    singular values.

    Example: tlspectral eigenvalues smollm2-135m L5H1,L16H0 -o eigenvalues.png

    The figure has a panel per head; its title gives D_head, the share of imaginary parts (0 to 1), of the head and of
    the random matrices.

    Not shown: what the head attends to, or the effect of rotary positions.
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

    The figure has a panel per head: scores before the softmax (logits) on random tokens against the offset of the key,
    from -20 to 0 tokens.

    Not shown: whether distance alone decides; contents contribute to the mean.
    """

    def draw(loaded: Any, chosen: Any) -> Any:
        from tlspectral import plots, relative_position_kernel

        return plots.kernel(relative_position_kernel(loaded, chosen))

    _draw_heads(draw, output, model, heads, device=device, dtype=dtype, revision=revision)
