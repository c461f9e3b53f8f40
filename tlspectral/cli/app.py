"""The application: global options, errors in one line, and options and checks that commands share."""

import os
import re
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from tlspectral.errors import MissingParts, TlspectralError, did_you_mean, kind_of, shown
from tlspectral.version import __version__

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_REFUSAL, _INTERRUPTED = 2, 130
_GIVEN, _SHARD = "tlspectral.given", "tlspectral.shard"  # keys in the `meta` of a command's context
_KEPT: ContextVar[Path | None] = ContextVar("kept", default=None)  # folder of the running command
MODEL_HELP = "Hub name, local folder, .gguf file, or a demo model: tiny-rope, tiny-ape, smollm2-135m, gemma3-270m."


def choice(option: str, names: tuple[str, ...], text: str) -> Any:
    """Return a typer option with the flag `option` (such as "--dtype") and the help `text` that accepts only one of
    `names`; any other value is refused before the command begins.
    """

    def checked(value: str | None) -> str | None:
        if value is None or value in names:
            return value
        raise typer.BadParameter(f"{shown(value)} is none of {', '.join(names)}{did_you_mean(value, names)}")

    return typer.Option(
        option, metavar="|".join(names), help=text, callback=checked, autocompletion=lambda: list(names)
    )


def _checked_device(name: str | None) -> str | None:
    """Return the value of --device, such as "cuda:1", unchanged. Raises typer's BadParameter if it is not the name
    of a device.
    """
    if name is not None and not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", name):
        raise typer.BadParameter(f"{name!r} is none of cpu, cuda, mps and xpu, alone or with a number as in cuda:1")
    return name


def _hide_bars(context: Any, quiet: bool) -> bool:
    """Switch off progress bars until the command ends if `quiet` is True; return `quiet`. `context` is the command's
    click context.
    """
    if quiet:
        from tlspectral.tables.progress import without_bars

        context.with_resource(without_bars())
    return quiet


def _shared_out(context: Any, text: str | None) -> str | None:
    """Let the command make only the jobs of one process, given as `text` ("3/16", the value of --shard), and record the
    command line for `collect`.

    Return `text`; None changes nothing. `context` is the command's click context. Raises typer's BadParameter for other
    texts.
    """
    if text is None:
        return None
    from tlspectral.tables.job import sharing
    from tlspectral.tables.sharing import Shard

    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None:
        raise typer.BadParameter(f"{text!r} is not a shard: give its number and the number of shards, such as 3/16")
    words_given = context.meta[_GIVEN]
    words = zip(["", *words_given], words_given, strict=False)
    command = [word for before, word in words if before != "--shard" and not word.startswith("--shard")]
    asked = {"command": command, "directory": os.getcwd()}
    context.with_resource(sharing(Shard.numbered(int(numbers[1]), int(numbers[2]), **asked)))
    context.meta[_SHARD] = text
    return text


def table_path(context: Any, path: Path | None) -> Path | None:
    """Return the value of an argument TABLE. Raises ValueError if the argument names heads instead of a file, such as
    "L9H9" or "L5H1,L7". `context` is the command's click context.
    """
    if path is None or path.exists():
        return path
    kinds = {kind_of(name) for name in str(path).split(",")}
    said = {"a head": "a head", "all heads of a layer": "a layer", "a key/value group": "a key/value group"}
    if not kinds <= said.keys():
        return path
    what = "are heads" if len(str(path).split(",")) > 1 else f"is {said[kinds.pop()]}"
    takes_heads = any("--heads" in parameter.opts for parameter in context.command.params)
    cure = "heads by --heads" if takes_heads else "a parquet file that tlspectral wrote, such as heads.parquet"
    raise ValueError(f"{shown(str(path))} {what}, not a table: give {cure}")


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Revision = Annotated[
    str | None, typer.Option("--revision", metavar="NAME", help="Branch, tag or commit of a hub model.")
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Such as cpu or cuda:1. Default: CUDA if there is a GPU, else the CPU.",
        callback=_checked_device,
    ),
]
DType = Annotated[
    str | None,
    choice("--dtype", ("float32", "float64", "bfloat16", "float16"), "Type of the weights. Default: float32."),
]
Format = Annotated[
    str | None,
    choice("--format", ("json", "csv"), "Print the table in this form to standard output, and nothing else."),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="Print no progress and no text, only the table of --format.",
        callback=_hide_bars,
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Run as process I of N, I from 1: make every Nth job. The last process, or collect, makes the table.",
        callback=_shared_out,
    ),
]
TableFile = Annotated[
    Path, typer.Argument(metavar="TABLE", help="Parquet file written by tlspectral.", callback=table_path)
]
Folder = Annotated[
    Path | None,
    typer.Option("--folder", metavar="FOLDER", help="Keep finished layers here; the same command resumes from them."),
]
TableOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the table: .parquet, or .csv with the columns' meaning in .columns.csv.",
    ),
]
FigureOutput = Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Figure: .png, .pdf or .svg.")]
TrainedOn = Annotated[str, typer.Option("--device", help="Where to train: cpu, cuda, cuda:1, mps, ...")]
Preset = Annotated[str, typer.Option("--preset", help="quick (minutes) or paper (hours).")]


_CONTENTS = {
    "A model": ("demo", "analyze", "report", "verify", "ablate", "positional", "collect"),
    "Why a head looks there": ("edges", "pairs", "attribution"),
    "A table of heads": ("show", "compare"),
    "A picture": ("wall", "map", "plane", "effects", "circuit", "patterns", "eigenvalues", "kernel"),
    "The three papers": ("study",),
}


class _Commands(TyperGroup):
    """The click group of all commands: it lists them by subject, and prints errors that a user can correct as one
    line with exit status 2. --debug shows the traceback.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in _CONTENTS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, names in _CONTENTS.items():
            commands = [(name, self.commands[name].get_short_help_str(limit=60)) for name in names]
            with formatter.section(title):
                formatter.write_dl(commands, col_max=30)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_GIVEN] = list(args)
        return super().parse_args(ctx, args)

    def make_context(self, *given: Any, **options: Any) -> Any:
        try:
            return super().make_context(*given, **options)
        except KeyboardInterrupt as interrupt:
            raise _interrupted(interrupt, None) from interrupt

    def invoke(self, ctx: Any) -> Any:
        keeps(None)
        try:
            return super().invoke(ctx)
        except MissingParts as error:  # a shard that has made its own jobs has succeeded
            typer.echo(str(error), err=True)
            raise typer.Exit(0 if _SHARD in ctx.meta else 1) from error
        except KeyboardInterrupt as interrupt:
            raise _interrupted(interrupt, _KEPT.get()) from interrupt
        except (TlspectralError, ValueError, OSError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            message = " ".join(str(error).split()) or type(error).__name__
            typer.echo(f"tlspectral: error: {message}", err=True)
            raise typer.Exit(_REFUSAL) from error


def _interrupted(interrupt: KeyboardInterrupt, folder: Path | None) -> typer.Exit:
    """Print one line on stderr about an interrupted command; return the exception that ends it with status 130.

    `folder` is where the command keeps finished parts. If the interrupted work itself says what is kept, that is
    printed.
    """
    text = str(interrupt).replace("give folder=", "give --folder")
    kept = folder is not None and folder.is_dir() and any(folder.iterdir())
    if kept and (not text or "nothing is kept" in text):
        text = f"interrupted; finished parts are kept in {folder}, and the same command goes on from there"
    typer.echo(f"tlspectral: {text or 'interrupted'}", err=True)
    return typer.Exit(_INTERRUPTED)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command `tlspectral` with the arguments of this process (sys.argv), then exit; it does not return.

        tlspectral analyze smollm2-135m -o heads.parquet

    The exit status is 0 for success, 1 for partial results (such as a model that failed), 2 for an error that the user
    can correct, which is printed as one line on stderr, and 130 after an interrupt. `tlspectral --help` lists the
    commands; in Python call the functions of `tlspectral` instead.
    """
    app()


def _print_version(wanted: bool) -> bool:
    """If `wanted` (--version was given), print the version and exit; otherwise return False."""
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
    """The spectrum of attention heads: one table row per head, against a matched random null.

    The options here stand before a command, as in: tlspectral --debug analyze smollm2-135m. They change nothing but
    what is printed.
    """


def require_writable(output: Path) -> None:
    """Make the missing parent folders of the file `output`; raise IsADirectoryError or PermissionError if it cannot
    be written. Called before long work begins.
    """
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder: give -o a file name in it")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"no permission to write in {output.parent}: give -o a path in another folder")


def require_shared(folder: Path | None, option: str) -> None:
    """Raise typer's BadParameter if --shard was given but `folder` is None; `option` is the option that names the
    folder, such as "--folder".
    """
    from tlspectral.tables.job import current_shard

    if folder is None and current_shard() is not None:
        raise typer.BadParameter(f"needs {option}, a folder that all shards can read", param_hint="--shard")


def keeps(folder: Path | None) -> None:
    """Note that the running command keeps finished parts in `folder`, for the message after an interrupt."""
    _KEPT.set(folder)


def listed_heads(heads: str | None) -> list[str] | None:
    """Return the heads, groups and layers in a text such as "L5H1,L7" as a list of names, or None for None. Raises
    BadHead for a wrong name.
    """
    from tlspectral.selection.heads_as_written import named_heads

    listed = None if heads is None else heads.split(",")
    named_heads(listed or [])
    return listed


def require_table_file(output: Path | None) -> None:
    """Raise an error if a table cannot be written to the path `output`: unknown type (not .parquet or .csv), a
    folder, or no permission. None passes. Called before long work begins.
    """
    if output is None:
        return
    if not output.is_dir() and output.suffix.lower() not in (".parquet", ".csv"):
        raise ValueError(f"{output}: tables are .parquet or .csv files: give -o a name that ends in one of these")
    require_writable(output)


def deliver(table: "pd.DataFrame", output: Path | None, form: str | None) -> None:
    """Write the table to the file `output` unless it is None, and print it if `form` is "csv" (with header) or "json"
    (a list of rows).

    In printed tables NaN is empty (CSV) or null (JSON).
    """
    if output is not None:
        import tlspectral

        tlspectral.write_table(table, output)
    if form is not None:
        text = table.to_csv(index=False) if form == "csv" else table.to_json(orient="records", double_precision=15)
        typer.echo(str(text).rstrip("\n"))


def write_figure(figure: "Figure", path: Path, dpi: int = 200) -> None:
    """Save a matplotlib figure as the file `path`, in the format of its ending; after an interrupt an older file is
    unchanged.
    """
    from tlspectral.tables.atomic_writes import whole_file

    with whole_file(path) as partial:
        figure.savefig(partial, dpi=dpi, format=path.suffix.removeprefix("."))
