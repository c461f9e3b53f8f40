"""Jobs on one folder that are killed at random moments and started again.

As a program: `killed_jobs.py FOLDER`. It forks the jobs, so that one begins within milliseconds, kills half of them,
and prints how many were killed. `benchmarks/shards.py` kills shards.
"""

import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd

from tlspectral.tables.job import Job
from tlspectral.tables.measurement import finished_jobs
from tlspectral.tables.resume_folder import open_resume_folder

JOBS = 8
PARTS = 40


def made(number):
    """A table that takes some time."""
    time.sleep(0.02)
    table = pd.DataFrame({"number": [number] * 1000, "square": [float(number) ** 2] * 1000})
    table.attrs = {"seed": number, "file": "tiny.gguf"}
    return table


def make_parts(folder, job=0, make=made):
    """Do all parts of a work, as job 0 from the first to the last, as job 1 from the last to the first."""
    numbers = range(PARTS) if job % 2 == 0 else reversed(range(PARTS))
    parts = [Job(f"some/part{number}", partial(make, number)) for number in numbers]
    opened = open_resume_folder(folder, {"a": 1}, noted={"model": "one"})
    (opened.path / "some").mkdir(exist_ok=True)
    found = finished_jobs(parts, opened, description="work", unit="part")
    for number in range(PARTS):
        pd.testing.assert_frame_equal(found[f"some/part{number}"], made(number))


def write_slowly():
    """Let a write of bytes take longer than a part, so that kills fall into it."""
    written = Path.write_bytes

    def halves(self, data):
        half = written(self, data[: len(data) // 2])
        time.sleep(0.05)
        with self.open("ab") as file:
            return half + file.write(data[half:])

    Path.write_bytes = halves


def run_jobs(job, pause, most, seed=0, mortal=JOBS // 2, died=None):
    """Run `job(number)` in processes until all have ended well, and return how many were killed.

    Of the first `mortal` one is killed every `pause` seconds on average, at `most` so many. `died` is called with the
    process id of one that was killed, before it is started again.
    """
    generator, kills = random.Random(seed), 0
    running = {_started(job, number): number for number in range(JOBS)}
    while running:
        time.sleep(generator.uniform(0, 2 * pause))
        chosen = [pid for pid, number in running.items() if number < mortal]
        killed = generator.choice(chosen) if chosen and kills < most else None
        if killed is not None:
            os.kill(killed, signal.SIGKILL)
        for pid in list(running):
            ended, status = os.waitpid(pid, 0 if pid == killed else os.WNOHANG)
            if not ended:
                continue
            number = running.pop(pid)
            if status == signal.SIGKILL:
                kills += 1
                if died is not None:
                    died(ended)
                running[_started(job, number)] = number
            elif status:
                raise SystemExit(f"job {number} ended with status {status}")
    return kills


def _started(job, number):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        job(number)
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    write_slowly()
    killed = run_jobs(partial(make_parts, sys.argv[1]), 0.02, 40)
    sys.stdout.write(f"{killed}\n")
