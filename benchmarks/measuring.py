"""Measurements shared by the benchmarks: CPU seconds and the memory of tensors."""

import gc
import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def seconds(job: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    gc.collect()
    start = time.process_time()
    job()
    return time.process_time() - start


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
