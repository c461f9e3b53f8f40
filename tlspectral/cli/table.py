"""Commands about a table of heads: `show`, `compare`."""

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
from tlspectral.cli.terminal_summary import changes, random_heads, read_heads, summary


@app.command(short_help="what stands out in a table")
def show(
    table: TableFile,
    top: Annotated[int, typer.Option(min=1, help="Rows of each list.")] = 5,
) -> None:
    """Print what stands out in a table of heads.

    Example: tlspectral show heads.parquet --top 10
    """
    typer.echo(summary(read_heads(table), top))


@app.command(short_help="which heads differ between two models")
def compare(
    base: Annotated[
        str, typer.Argument(metavar="BASE", help=f"Table of `tlspectral analyze`, or a model. {MODEL_HELP}")
    ],
    tuned: Annotated[str, typer.Argument(metavar="TUNED", help="The same of the changed model.")],
    top: Annotated[int, typer.Option(min=1, help="Heads of each list.")] = 10,
    output: TableOutput = None,
) -> None:
    """Print the heads that differ most between two models of one shape: in weights, behaviour and spectrum.

    Example: tlspectral compare base.parquet tuned.parquet -o comparison.parquet

    Example: tlspectral compare ./base-model ./tuned-model

    Of two tables, differences of 0.02 or more are listed that noise does not explain. Of two models also how far the
    operators of each head differ; their tables are made first, as by analyze.
    """
    require_table_file(output)
    from tlspectral import compare_heads

    given = {name: _table_or_model(name) for name in (base, tuned)}
    tables = [name for name, one in given.items() if not isinstance(one, str)]
    if len(tables) == 1 < len(given):
        other = tuned if tables[0] == base else base
        raise ValueError(
            f"{tables[0]} is a table and {other} a model: give two tables (tlspectral analyze {other} -o FILE.parquet "
            "makes the other one) or two models"
        )
    comparison = compare_heads(given[base], given[tuned])
    typer.echo("\n".join([changes(comparison, top), *(random_heads(given[base]) if tables else [])]))
    deliver(comparison, output, None)
    if output is not None:
        typer.echo(str(output))


def _table_or_model(name: str) -> Any:
    """Return the table in a file; the name as it is, of what is no file of a table."""
    path = Path(name).expanduser()
    if path.suffix.lower() in (".parquet", ".parq", ".pq", ".csv") or (path.is_file() and path.suffix != ".gguf"):
        return read_heads(path)
    return name
