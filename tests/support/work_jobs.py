"""Parts of works and how they are finished, in a module that loads no torch: each worker process imports it anew."""

import os
import time
from functools import partial

import pandas as pd

from tlspectral.tables.job import Job
from tlspectral.tables.measurement import finished_jobs

finished = partial(finished_jobs, description="work", unit="part")


def table_of(number, *prepared):
    return pd.DataFrame({"number": [number], "pid": os.getpid(), "prepared": [*prepared, None][:1]})


def parts_of(count, make=table_of):
    return [Job(f"part{number}", partial(make, number)) for number in range(count)]


def numbers(tables):
    return [table["number"].item() for table in tables.values()]


def wait_for_both(number, *prepared, folder):
    """Parts 0 and 1 each wait until the other has begun, so that two workers have to take one each."""
    (folder / f"begun{number}").touch()
    until = time.monotonic() + 60
    while number < 2 and not (folder / f"begun{1 - number}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return table_of(number, *prepared)


def fails(number):
    if number == 1:
        raise ValueError("part 1 cannot be made")
    return table_of(number)


def prepared_by(folder):
    """Leave a file for each time that it is done."""
    with open(folder / f"prepared_{os.getpid()}_{time.monotonic_ns()}", "w"):
        return f"by {os.getpid()}"


def until_the_bar_moves(number, folder):
    """The last part waits for a file, which appears when the bar has moved."""
    until = time.monotonic() + 60
    while number == 3 and not (folder / "moved").exists():
        if time.monotonic() > until:
            raise TimeoutError("the bar does not move while work is under way")
        time.sleep(0.01)
    return table_of(number)
