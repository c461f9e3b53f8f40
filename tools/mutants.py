"""Mutation sample: small mistakes put into the core, one at a time, and the tests that have to notice them.

    python tools/mutants.py collect --tree . --contexts out/contexts.sqlite
    python tools/mutants.py run --tree . --contexts out/contexts.sqlite -o out/mutants.jsonl --count 300
    python tools/mutants.py report out/mutants.jsonl

A mutant swaps an operator, a comparison, a sign, a small constant or two returns in one place, or deletes a statement
or a raise. Annotations and messages are left alone. They are drawn with a seed from all files of the core in proportion
to their lines; more of them begin with the same ones. A mutant meets the tests that run its lines (`mutant_tests.py`),
the fastest first, until one fails: it is killed. A test that kills is also run on the same file without the mistake,
and does not count if it fails there too. Tests that would take longer than the limit together are left out, and a run
that takes more than three times the limit is a kill.

`--suite fast` takes the tests of `make test`, those not marked slow; `--suite all` goes on with the slow ones where
these find nothing, so that its report says both. Processes that tests start do not see the mistake. A run that was
stopped goes on where it stopped; results of another source or seed are refused. A mutant may compute the same function
as the original; those that survive have to be read.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import mutant_tests
from mutations import Mutant, core_files, drawn, mutated, room_of

ROOT = Path(__file__).resolve().parents[1]


def collect(options: argparse.Namespace) -> None:
    """Store which tests run which lines."""
    given = options.files or [
        path for folder in ("tests", "studies/tests") for path in sorted((options.tree / folder).rglob("test_*.py"))
    ]
    for slow in (False, True) if options.suite == "all" else (False,):
        mutant_tests.collect(options.tree, options.contexts, given, slow=slow)


def digest(tree: Path) -> str:
    """A hash of the source of the core."""
    return hashlib.sha256(b"".join((tree / file).read_bytes() for file in core_files(tree))).hexdigest()[:16]


def stored(path: Path, head: dict[str, Any]) -> list[dict[str, Any]]:
    """Results that a file holds, made if it is not there. Raises SystemExit for those of other work."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n")
    found, *rows = (json.loads(line) for line in path.read_text().splitlines())
    if found != head:
        raise SystemExit(f"{path} holds results of {found}, not of {head}: name another file")
    return rows


def run(options: argparse.Namespace) -> None:
    """Draw mutants, run the tests of each and store how it went, until the count or the budget is reached."""
    if not options.contexts.exists():
        raise SystemExit(f"{options.contexts} does not exist: make it with the command collect")
    head = {"core": digest(options.tree), "seed": options.seed, "suite": options.suite, "limit": options.limit}
    head |= {} if options.only == "*" else {"only": options.only}
    rows = stored(options.output, head)
    spent, known = sum(row["cpu"] for row in rows), {(row["file"], row["number"]) for row in rows}
    os.environ["OMP_NUM_THREADS"] = "1"
    mutant_tests.preload()
    mutants = islice(
        (one for one in drawn(options.tree, options.seed) if fnmatch(one.file, options.only)), options.count
    )
    waiting = iter([mutant for mutant in mutants if (mutant.file, mutant.number) not in known])
    sound: dict[tuple[str, ...], bool] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while True:
            while len(running) < options.jobs and spent < 3600 * options.hours and (mutant := next(waiting, None)):
                running.add(pool.submit(tried, mutant, options, sound))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                row = future.result()
                spent += row["cpu"]
                with options.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                by = row["fast"] if row["fast"] != "survived" else row.get("slow", row["fast"])
                print(f"{row['file']}:{row['line']}: {row['change']}: {by} {row['test']}", flush=True)
    print(f"{spent:.0f} CPU s in all")
    print(*report_lines(options.output), sep="\n")


def tried(mutant: Mutant, options: argparse.Namespace, sound: dict[tuple[str, ...], bool]) -> dict[str, Any]:
    """The row of a mutant: `fast` and `slow` say whether these tests killed it, `test` which did."""
    place = mutant.place
    row = {"file": mutant.file, "number": mutant.number, "line": place.line, "change": place.change}
    row |= {"test": "", "cpu": 0.0, "tests": 0, "ran": 0}
    contexts = mutant_tests.opened(options.contexts)
    tests = mutant_tests.tests_of(contexts, mutant.file, place.first, place.last, in_function=place.in_function)
    for kind in ("fast", "slow") if options.suite == "all" else ("fast",):
        of_kind = [test for test in tests if test.slow == (kind == "slow")]
        chosen = mutant_tests.within(of_kind, options.limit)
        row |= {"tests": row["tests"] + len(of_kind), "ran": row["ran"] + len(chosen)}
        # Few tests first: most mutants are killed by one of them, and each further file of tests has to be imported.
        row[kind] = "survived"
        for batch in (chosen[:15], chosen[15:]):
            if row[kind] == "survived":
                row[kind], row["test"], cpu = killed(mutant, batch, options, sound)
                row["cpu"] += cpu
        if row[kind] != "survived":
            break
    return row


def killed(
    mutant: Mutant, tests: list[mutant_tests.Test], options: argparse.Namespace, sound: dict[tuple[str, ...], bool]
) -> tuple[str, str, float]:
    """Run tests until one fails that does not fail on the same file without the mistake: outcome, test, CPU seconds."""
    spent = 0.0
    sources = [mutated(options.tree, mutant.file, number) for number in (mutant.number, None)]
    while tests:
        ended, test, cpu = mutant_tests.run(options.tree, mutant.file, sources[0], tests, 3 * options.limit)
        spent += cpu
        if ended == "passed":
            break
        # Where tests could not be collected, one test of each file shows whether they can be without the mistake.
        by_file = {one.node.split("::")[0]: one for one in tests}
        guilty = [one for one in tests if one.node == test] or list(by_file.values())
        key = (mutant.file, *(one.node for one in guilty))
        if ended == "failed" and key not in sound:
            again = mutant_tests.run(options.tree, mutant.file, sources[1], guilty, 3 * options.limit)
            spent += again.cpu
            sound[key] = again.ended == "passed"
        if ended == "timeout" or sound[key]:
            return "killed" if ended == "failed" else "timeout", test, spent
        tests = [one for one in tests if one not in guilty]
    return "survived", "", spent


def survived(row: dict[str, Any]) -> bool:
    """Whether no test killed a mutant."""
    return {row["fast"], row.get("slow", "survived")} == {"survived"}


def report_lines(path: Path) -> Iterator[str]:
    """Kills per room and in all, and the mutants that survived."""
    head, *rows = (json.loads(line) for line in path.read_text().splitlines())
    yield f"core {head['core']}, seed {head['seed']}, suite {head['suite']}"
    rooms = sorted({room_of(row["file"]) for row in rows})
    for room in (*rooms, "in all"):
        chosen = [row for row in rows if room in (room_of(row["file"]), "in all")]
        fast = sum(row["fast"] != "survived" for row in chosen)
        both = sum(not survived(row) for row in chosen)
        said = f"{room}: {both} of {len(chosen)} killed"
        yield f"{said}, {fast} by fast tests ({fast / max(both, 1):.0%})" if head["suite"] == "all" else said
    for row in rows:
        if survived(row):
            ran = f"{row['ran']} of {row['tests']} tests ran"
            yield f"survived: {row['file']}, line {row['line']}: {row['change']} ({ran})"


def main() -> None:
    """Read the arguments, and collect, run or report."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("collect", help="store which tests run which lines of the core")
    command.add_argument("files", type=Path, nargs="*", help="files of tests; all if none is named")
    command.set_defaults(call=collect)
    command = commands.add_parser("run", help="draw mutants and run their tests")
    command.set_defaults(call=run)
    command.add_argument("-o", "--output", type=Path, required=True, help="file of results, a line per mutant")
    command.add_argument("--count", type=int, default=300, help="mutants that are drawn")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--only", default="*", help="pattern of files, such as 'tlspectral/hooks/*'")
    command.add_argument("--jobs", type=int, default=1)
    command.add_argument("--limit", type=float, default=60, help="seconds of tests per mutant and kind of tests")
    command.add_argument("--hours", type=float, default=6, help="CPU hours in all, those of earlier runs too")
    for command in commands.choices.values():
        command.add_argument("--tree", type=lambda path: Path(path).resolve(), default=ROOT, help="a source tree")
        command.add_argument("--contexts", type=Path, required=True, help="file of contexts, outside of the tree")
        command.add_argument("--suite", choices=("fast", "all"), default="fast")
    command = commands.add_parser("report", help="print kills per room, and what survived")
    command.add_argument("output", type=Path)
    command.set_defaults(call=lambda options: print(*report_lines(options.output), sep="\n"))
    options = parser.parse_args()
    options.call(options)


if __name__ == "__main__":
    main()
