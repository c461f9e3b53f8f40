"""Reliability of shards: 8 jobs share 40 parts of one folder, and are killed 200 times at random moments.

Run `python benchmarks/shards.py` (half a minute; `--kills 20` for a smoke run). Parts are tables of 1000 rows that take
20 ms to make and 50 ms to write, most of it asleep, so that kills fall into both. A killed job is started again as the
shard that it was. The folder must have the bytes that one job leaves; a part must be made once, and once more for each
kill that fell into it; one job at least must find all parts. The program ends with an error otherwise, or where the
work ends before so many kills: then lower `--pause`.
"""

import json
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from killed_jobs import JOBS, PARTS, made, make_parts, run_jobs, write_slowly

from tlspectral.tables import shard


def noted(log: Path, *words: object) -> None:
    """Append a line; a line of this length is written in one step."""
    with log.open("a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


def lines(log: Path, kind: str) -> list[list[str]]:
    """Notes of a kind: `begun` with process and part, `whole` with process."""
    return [line.split()[1:] for line in log.read_text(encoding="utf-8").splitlines() if line.startswith(kind)]


def begin(log: Path, number: int) -> object:
    """Make a part, and note that it was begun."""
    noted(log, "begun", os.getpid(), number)
    return made(number)


def make_share(folder: Path, log: Path, job: int) -> None:
    """Make the parts of a shard, and note if all parts were there in the end."""
    with shard(job + 1, JOBS):
        make_parts(folder, make=partial(begin, log))
        noted(log, "whole", os.getpid())


def files(folder: Path) -> dict[str, bytes]:
    """What is seen of a folder: no notes of shards, no unfinished files of killed jobs."""
    found = {file.relative_to(folder): file for file in folder.rglob("*") if file.is_file()}
    return {
        str(name): file.read_bytes() for name, file in found.items() if not any(part[0] == "." for part in name.parts)
    }


def main(
    kills: Annotated[int, typer.Option(help="Kills.")] = 200,
    pause: Annotated[float, typer.Option(help="Mean seconds between two kills.")] = 0.04,
    seed: Annotated[int, typer.Option(help="Of the moments and of the jobs that are killed.")] = 0,
) -> None:
    """Kill shards, and print what was made how often."""
    cut_short: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        many, one, log = Path(temporary) / "many", Path(temporary) / "one", Path(temporary) / "log"
        log.touch()

        def died(process: int) -> None:
            begun = [part for owner, part in lines(log, "begun") if owner == str(process)]
            if begun and not (many / "some" / f"part{begun[-1]}.parquet").exists():
                cut_short.append(begun[-1])

        make_parts(one)
        write_slowly()
        began = time.perf_counter()
        killed = run_jobs(partial(make_share, many, log), pause, kills, seed, mortal=JOBS, died=died)
        counts = {
            "shards": JOBS,
            "parts": PARTS,
            "kills": killed,
            "kills inside a part": len(cut_short),
            "parts begun": len(lines(log, "begun")),
            "jobs that found all parts": len(lines(log, "whole")),
            "same bytes as one job": files(many) == files(one),
            "seconds": round(time.perf_counter() - began, 1),
        }
    typer.echo(json.dumps(counts, indent=1))
    if not (
        killed == kills
        and counts["same bytes as one job"]
        and counts["parts begun"] == PARTS + len(cut_short)
        and counts["jobs that found all parts"]
    ):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
