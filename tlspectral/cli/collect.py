"""The command `collect`, which joins the jobs that shards made."""

import os
from pathlib import Path
from typing import Annotated

import typer.main

from tlspectral.cli.app import app


@app.command(short_help="the table of a folder that shards have filled")
def collect(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that the commands with --shard share.")],
) -> None:
    """Make the tables of work that several processes (commands with --shard) did, or list missing jobs (exit status 1).

    Example: tlspectral collect sweep

    If all jobs are there, the command that had --shard runs again without it, in the folder where it was given. It
    computes no job again, and writes and prints its table as without --shard. If a Python function made the jobs, call
    it again: it returns the table.

    It fails (exit status 2) if FOLDER has no work of shards. It does not show whether processes still run: a missing
    job may be under way.
    """
    from tlspectral.tables.job import sharing
    from tlspectral.tables.sharing import Shard, noted_works, require_parts

    works = list(noted_works(folder))
    if not works:
        raise ValueError(f"{folder} has no work of shards: give the folder that the commands with --shard share")
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
