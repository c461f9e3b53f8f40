"""CPU seconds of each file of tests, with those of the processes that its tests start and wait for.

`--cpu-seconds` prints them at the end of a run, the dearest files first. What no test can be charged with, imports and
collection in each worker, is a line of its own.
"""

import os
from collections import Counter

import pytest

SHOWN = 25


def pytest_addoption(parser):
    parser.addoption("--cpu-seconds", action="store_true", help=f"print the CPU seconds of the {SHOWN} dearest files")


def pytest_configure(config):
    if config.getoption("--cpu-seconds"):
        config.pluginmanager.register(_Clock(), "cpu-seconds")


def spent():
    """CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


class _Clock:
    """Charges each phase of a test with what was spent since the phase before it."""

    def __init__(self):
        self.by_file, self.of_workers, self.at = Counter(), 0.0, 0.0

    def pytest_collection_finish(self):
        self.at = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = spent()
        report.cpu_seconds, self.at = now - self.at, now  # xdist sends what a report holds
        return report

    def pytest_runtest_logreport(self, report):
        self.by_file[report.nodeid.partition("::")[0]] += report.cpu_seconds

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = spent()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.of_workers += getattr(node, "workeroutput", {}).get("cpu_seconds", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        # Workers are children of this process too, so they are not counted as such.
        whole = os.times().user + os.times().system + self.of_workers if self.of_workers else spent()
        rows, of_files = self.by_file.most_common(SHOWN), sum(self.by_file.values())
        if len(self.by_file) > SHOWN:
            rows.append((f"{len(self.by_file) - SHOWN} other files", of_files - sum(dict(rows).values())))
        rows += [("imports and collection", whole - of_files), ("in all", whole)]
        terminalreporter.section("CPU seconds")
        for name, seconds in rows:
            terminalreporter.line(f"{seconds:8.1f}  {name}")
