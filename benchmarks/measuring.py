"""Measurements shared by the benchmarks: CPU seconds, of two source trees beside each other, and memory of tensors."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def seconds(job: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    gc.collect()
    start = time.process_time()
    job()
    return time.process_time() - start


def of_trees(script: str, trees: Sequence[Path], runs: int, *arguments: str) -> dict[str, list[list[float]]]:
    """CPU seconds by job, for each tree a list over runs, of a script that prints its jobs' seconds as a line of JSON.

    A run is a process with one thread that imports the tree; the trees take turns at going first.
    """
    found: dict[str, list[list[float]]] = {}
    for run in range(runs):
        for place in (0, 1) if run % 2 == 0 else (1, 0):
            here = {
                **os.environ,
                "PYTHONPATH": str(trees[place].resolve()),
                "OMP_NUM_THREADS": "1",
                "TQDM_DISABLE": "1",
            }
            command = [sys.executable, script, *arguments]
            done = subprocess.run(command, env=here, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            for job, seconds_of_job in json.loads(done.stdout.splitlines()[-1]).items():
                found.setdefault(job, [[], []])[place].append(seconds_of_job)
    return found


def peak(job: Callable[[], object]) -> float:
    """MiB of tensors alive at most during a call, less what was alive before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        job()
    events: Any = run.profiler
    alive = most = 0
    for event in sorted(events.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    return most / 2**20
