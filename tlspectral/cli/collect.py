"""The command that joins what shards made: `collect`."""

import os
from pathlib import Path
from typing import Annotated

import typer.main

from tlspectral.cli.app import app


@app.command(short_help="the table of a folder that shards have filled")
def collect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of commands that were given --shard.")],
) -> None:
    """Make the tables of work that was shared out, or say which parts are missing; the exit status is then 1.

    Example: tlspectral collect sweep

    When all jobs are there, the command that the shards were given runs again without --shard, in the folder where it
    was given. It makes no job, and writes and prints what it does without shards. Where a function of Python made the
    parts, call it again: it returns the table.
    """
    from tlspectral.tables.job import sharing
    from tlspectral.tables.sharing import Shard, noted_works, require_parts

    works = list(noted_works(folder))
    if not works:
        raise ValueError(f"{folder} holds no work of shards: name the folder of commands that were given --shard")
    parts: dict[Path, dict[str, None]] = {}
    for path, work in works:
        parts.setdefault(path, {}).update(dict.fromkeys(work["parts"]))
    for path, names in parts.items():
        require_parts(path, names)
        typer.echo(f"{path}: all {len(names)} jobs are there", err=True)
    for *command, directory in {(*work["command"], work["directory"]): None for _, work in works if "command" in work}:
        os.chdir(directory)
        with sharing(Shard(0, 1)):
            status = typer.main.get_group(app).main(command, standalone_mode=False)
        if status:
            raise typer.Exit(int(status))
