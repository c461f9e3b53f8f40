"""The application: global options, errors in one line, and arguments and checks shared by commands."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tlspectral.errors import TlspectralError
from tlspectral.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_REFUSAL = 2
MODEL_HELP = "Hub name, local folder, .gguf file, or a demo model: tiny-rope, tiny-ape, smollm2-135m, gemma3-270m."
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of a hub model.")
]
TableFile = Annotated[Path, typer.Argument(metavar="TABLE", help="Parquet file written by tlspectral.")]


_CONTENTS = {
    "A model": ("analyze", "verify", "ablate", "positional"),
    "A table of heads": ("show", "report", "plane", "statistics", "compare"),
    "The three papers": ("study",),
}


class _Commands(TyperGroup):
    """Lists commands by subject, and prints errors that a user can correct as one line; --debug shows the traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in _CONTENTS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in _CONTENTS.items():
            commands = [(name, self.commands[name].get_short_help_str(limit=60)) for name in names]
            with formatter.section(title):
                formatter.write_dl(commands, col_max=30)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (TlspectralError, ValueError, OSError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            typer.echo(f"tlspectral: error: {message}", err=True)
            raise typer.Exit(_REFUSAL) from error


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"tlspectral {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _global_options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """The spectrum of attention heads: one table row per head, against a matched random null."""


def require_writable(output: Path) -> None:
    """Refuse a path that cannot be written, before the command does its long work."""
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder: give -o a file name in it")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"no permission to write in {output.parent}: give -o another folder")


def write_figure(figure: "Figure", path: Path, dpi: int = 200) -> None:
    """Save a figure; after an interruption the old file is still there."""
    from tlspectral.tables import whole_file

    with whole_file(path) as partial:
        figure.savefig(partial, dpi=dpi)
