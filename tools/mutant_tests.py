"""Which tests run which lines of the core, how long they take, and runs of some of them on changed code.

The lines come from the contexts of coverage.py: `collect` runs one file of tests after another under
`pytest --cov --cov-context=test`, each in a fork of a process that has imported what all need, and keeps, in one file
outside of the source tree, seconds and outcome of every test and a mask of lines per test and file of the core. Files
of tests that it holds already are not run again.
"""

import contextlib
import json
import os
import resource
import signal
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, NamedTuple

_SCHEMA = """
create table if not exists done (file text, slow integer, primary key (file, slow));
create table if not exists tests (id integer primary key, node text unique, file text, seconds real, slow integer,
                                  passed integer);
create table if not exists masks (test integer, file text, mask text);
create table if not exists imports (tests text, file text, mask text);
create index if not exists masks_by_file on masks (file);
"""
_TIMES = "MUTANT_TESTS_TIMES"


class Test(NamedTuple):
    """A test, the seconds that it took, and whether it is marked slow."""

    node: str
    seconds: float
    slow: bool


# --- hooks of pytest, when it loads this file as a plugin ---


def pytest_runtest_logreport(report: Any) -> None:
    """Note seconds and outcome of each phase of each test."""
    if path := os.environ.get(_TIMES):
        slow = "slow" in report.keywords
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.duration, slow, report.outcome, report.when]) + "\n")


# --- the file of contexts ---


def opened(path: Path) -> sqlite3.Connection:
    """The file of contexts, made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path)
    database.executescript(_SCHEMA)
    return database


def collect(tree: Path, contexts: Path, files: Iterable[Path], *, slow: bool) -> None:
    """Run the files of tests that the file of contexts lacks, the tests marked slow or the others."""
    database = opened(contexts)
    preload()
    for path in files:
        name = path.resolve().relative_to(tree).as_posix()
        if database.execute("select 1 from done where file = ? and slow = ?", (name, slow)).fetchone():
            continue
        with tempfile.TemporaryDirectory(prefix="contexts_") as place:
            start = time.time()
            status, times, masks = _covered(tree, name, Path(place), slow=slow)
            if status not in (0, 1, 5):  # passed, some failed, none of that kind
                print(f"{name}: pytest ended with status {status}; its tests are left out", flush=True)
                continue
            with database:
                _keep(database, name, slow, times, masks)
            print(f"{name}: {len(times)} tests, {time.time() - start:.0f} s", flush=True)


def _covered(tree: Path, name: str, place: Path, *, slow: bool) -> tuple[int, dict[str, list[Any]], dict[Any, int]]:
    """Status of pytest in a fork; seconds, slow and passed by test; and masks of lines by test and file."""
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join([str(tree), here, *filter(None, [os.environ.get("PYTHONPATH")])])
    data = place / "coverage"
    child = os.fork()
    if child == 0:
        status = 3  # an error inside of pytest
        with contextlib.suppress(BaseException):
            os.environ.update({"PYTHONPATH": path, "COVERAGE_FILE": str(data), _TIMES: str(place / "times")})
            status = _run_covered(tree, name, slow=slow)
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    times: dict[str, list[Any]] = {}
    if (place / "times").exists():
        for line in (place / "times").read_text(encoding="utf-8").splitlines():
            node, seconds, is_slow, outcome, when = json.loads(line)
            known = times.setdefault(node, [0.0, is_slow, False])
            known[0] += seconds
            known[2] = outcome == "passed" if when == "call" else (known[2] and outcome == "passed") or when == "setup"
    return status, times, _masks(tree, data)


def _run_covered(tree: Path, name: str, *, slow: bool) -> int:
    """Run one file of tests under coverage, and return the status of pytest."""
    _silence()
    os.chdir(tree)
    sys.path[:0] = [str(tree), str(tree / "studies"), str(tree / "tests" / "support")]
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "mutant_tests", "-m"]
    options += ["slow" if slow else "not slow", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options += ["--cov", "--cov-context=test", "--cov-report="]
    return int(pytest.main([*options, name]))


def _silence() -> None:
    """Let what this process prints go nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _masks(tree: Path, data: Path) -> dict[Any, int]:
    """Lines that a test ran, as bits of a number, by test and file; those run by no test, but on import, by ""."""
    from coverage import CoverageData

    masks: dict[Any, int] = {}
    if not data.exists():
        return masks
    read = CoverageData(str(data))
    read.read()
    for path in read.measured_files():
        file = Path(path).relative_to(tree).as_posix()
        for line, contexts in read.contexts_by_lineno(path).items():
            for context in contexts:
                if line > 0:
                    key = context.rsplit("|", 1)[0], file
                    masks[key] = masks.get(key, 0) | 1 << line
    return masks


def _keep(database: sqlite3.Connection, name: str, slow: bool, times: dict[str, list[Any]], masks: Any) -> None:
    numbers = {}
    for node, (seconds, is_slow, passed) in times.items():
        row = (node, name, seconds, is_slow, passed)
        database.execute("delete from tests where node = ?", (node,))
        numbers[node] = database.execute(
            "insert into tests (node, file, seconds, slow, passed) values (?, ?, ?, ?, ?)", row
        ).lastrowid
    database.executemany(
        "insert into imports values (?, ?, ?)",
        [(name, file, hex(mask)) for (node, file), mask in masks.items() if not node],
    )
    rows = [(numbers[node], file, hex(mask)) for (node, file), mask in masks.items() if node in numbers]
    database.executemany("insert into masks values (?, ?, ?)", rows)
    database.execute("insert or replace into done values (?, ?)", (name, slow))


def tests_of(database: sqlite3.Connection, file: str, first: int, last: int, *, in_function: bool) -> list[Test]:
    """Tests that run some of these lines, the fastest first; then all other tests of the same files of tests.

    What a test has built is kept for the next ones of its file, which then do not run those lines and still depend on
    them. Lines that run on import belong to all tests of the files of tests that import the file.
    """
    lines = ((1 << last + 1) - 1) ^ ((1 << first) - 1)
    direct = database.execute(
        "select tests.node, tests.file, masks.mask from masks join tests on tests.id = masks.test where masks.file = ?",
        (file,),
    ).fetchall()
    imports = database.execute("select '', tests, mask from imports where file = ?", (file,)).fetchall()
    hit = [row for row in (*direct, *imports) if not in_function or int(row[2], 16) & lines]
    nodes, files = {row[0] for row in hit}, sorted({row[1] for row in hit})
    rows = [
        row
        for name in files
        for row in database.execute("select node, seconds, slow from tests where file = ? and passed", (name,))
    ]
    rows.sort(key=lambda row: (row[0] not in nodes, row[1], row[0]))
    return [Test(node, seconds, bool(slow)) for node, seconds, slow in rows]


def within(tests: Iterable[Test], limit: float) -> list[Test]:
    """The first tests that together take no more than so many seconds; one at least."""
    kept, spent = [], 0.0
    for test in tests:
        spent += test.seconds
        if kept and spent > limit:
            break
        kept.append(test)
    return kept


# --- runs of tests on changed code ---


class Outcome(NamedTuple):
    """How a run ended: `passed`, `failed`, `timeout`; the test that failed; CPU seconds."""

    ended: str
    test: str
    cpu: float


def preload() -> None:
    """Import what every run needs, before the forks. Nothing of the package itself may be loaded here."""
    import pandas  # noqa: F401
    import torch

    torch.set_num_threads(1)
    import pytest  # noqa: F401
    import transformers  # noqa: F401
    from transformer_lens.model_bridge import sources  # noqa: F401


def run(tree: Path, file: str, source: str, tests: list[Test], limit: float) -> Outcome:
    """Run tests in a fork that imports a file of the tree as another source, until one fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        failed = ""
        with contextlib.suppress(BaseException):
            os.setsid()
            _silence()
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit) + 1, int(limit) + 1))
            failed = "collection"
            failed = _first_failure(tree, file, source, tests)
        os.write(writing, failed.encode()[:4000])
        os._exit(bool(failed))
    os.close(writing)
    latest = time.monotonic() + 6 * limit + 60  # it may wait for what never comes, or for other work on the machine
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        if time.monotonic() > latest:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    with os.fdopen(reading, "rb") as pipe:
        failed = pipe.read().decode()
    _, status, usage = ended
    cpu = usage.ru_utime + usage.ru_stime
    if os.WIFSIGNALED(status):
        return Outcome("timeout", "", cpu)
    return Outcome("failed" if status else "passed", failed, cpu)


def _first_failure(tree: Path, file: str, source: str, tests: list[Test]) -> str:
    """Node id of the first test that fails, `collection` if tests cannot be collected, or nothing."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:0] = [str(tree), str(tree / "studies"), str(tree / "tests" / "support")]
    sys.dont_write_bytecode = True
    _import_changed(tree / file, source)
    import pytest

    options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", ""]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    chosen = _Chosen([test.node for test in tests])
    files = list(dict.fromkeys(test.node.split("::")[0] for test in tests))
    return "" if pytest.main([*options, *files], plugins=[chosen]) == 0 else chosen.failed or "collection"


class _Chosen:
    """A plugin that runs some tests in a given order and notes the first that fails."""

    def __init__(self, nodes: list[str]) -> None:
        self.order = {node: index for index, node in enumerate(nodes)}
        self.failed = ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = sorted((item for item in items if item.nodeid in self.order), key=lambda one: self.order[one.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _import_changed(file: Path, source: str) -> None:
    """Let a file be imported as another source, by whichever loader the tests use."""
    real = SourceFileLoader.get_data

    def get_data(self: SourceFileLoader, path: str) -> bytes:
        if Path(self.path) != file:
            return real(self, path)
        if str(path).endswith(".pyc"):
            raise OSError("a mutant has no compiled file")
        return source.encode()

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
