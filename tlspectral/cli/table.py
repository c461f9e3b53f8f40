"""Commands about a table of heads: `show` and `compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tlspectral.cli.app import (
    MODEL_HELP,
    TableFile,
    TableOutput,
    app,
    deliver,
    require_table_file,
)
from tlspectral.cli.terminal_summary import changes, first_screen, random_heads, read_heads, summary


@app.command(short_help="heads that stand out in a table")
def show(
    table: TableFile,
    top: Annotated[int, typer.Option(min=1, help="Rows of each list.")] = 5,
    everything: Annotated[
        bool, typer.Option("--all", help="Print more columns, the settings, the versions and the self-check.")
    ] = False,
) -> None:
    """Print the heads that stand out in a table, on one screen.

    Example: tlspectral show heads.parquet --top 10

    TABLE is written by `tlspectral analyze -o`. The text gives the heads with the highest score of each detector (mean
    attention, 0 to 1), the heads whose rotational share D_head (0 to 1) is furthest from its random null, medians over
    all heads, and how many heads could not be computed. Heads whose score is not above chance are left out: the score
    less its error, widened for the number of heads, has to exceed the chance level. Where the table records no chance
    level, no head is left out.

    On a terminal, names of heads are bold; the environment variable NO_COLOR=1 switches this off.

    Not shown: whether the model needs a head; the first of many heads stand out by chance too.
    """
    heads = read_heads(table)
    typer.echo(summary(heads, top) if everything else first_screen(heads, top))


@app.command(short_help="which heads differ between two models")
def compare(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help=f"Table of `tlspectral analyze`, or a model. {MODEL_HELP}")
    ],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The same for the changed model.")],
    top: Annotated[int, typer.Option(min=1, help="Heads of each list.")] = 10,
    output: TableOutput = None,
) -> None:
    """Print the heads that differ most between two models of the same shape: in weights, behaviour and spectrum.

    Example: tlspectral compare base.parquet tuned.parquet -o comparison.parquet

    Example: tlspectral compare ./base-model ./tuned-model

    For two tables, it lists differences (TUNED less BASE) of 0.02 or more that exceed twice their standard deviation by
    sampling. For two models, it makes their tables first, as by analyze, and also lists how much the query-key and
    output matrices of each head differ, relative to BASE. -o writes a table with a row per head.

    Not shown: whether a difference changes the model's answers. Heads of two separate trainings are unrelated, so their
    differences mean nothing.
    """
    require_table_file(output)
    from tlspectral import compare_heads

    given = {name: _table_or_model(name) for name in (base, tuned)}
    tables = [name for name, source in given.items() if not isinstance(source, str)]
    if len(tables) == 1 < len(given):
        other = tuned if tables[0] == base else base
        raise ValueError(
            f"{tables[0]} is a table and {other} a model: give two tables (tlspectral analyze {other} -o FILE.parquet "
            "makes the second) or two models"
        )
    comparison = compare_heads(given[base], given[tuned])
    typer.echo("\n".join([changes(comparison, top), *(random_heads(given[base]) if tables else [])]))
    deliver(comparison, output, None)
    if output is not None:
        typer.echo(str(output))


def _table_or_model(name: str) -> Any:
    """Return the head table in the file `name` as a DataFrame, or `name` itself if it is not a table file, so that
    it names a model.
    """
    path = Path(name).expanduser()
    if path.suffix.lower() in (".parquet", ".parq", ".pq", ".csv") or (path.is_file() and path.suffix != ".gguf"):
        return read_heads(path)
    return name
