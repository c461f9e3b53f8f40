"""Run independent CPU computations in threads of this process; each thread uses one thread of BLAS."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import joblib
import torch

from tlspectral.algebra.nulls import one_thread

Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_count(n_jobs: int | None) -> int:
    """Return how many threads to use for a loaded model, from the `n_jobs` of a public function.

    None or 1 (the default) means all cores of this process: the smaller of joblib's count (affinity, limits of a
    container) and torch's number of threads (`OMP_NUM_THREADS`, `torch.set_num_threads`). Other numbers are read as in
    joblib: -1 means all cores. Raises ValueError for 0.
    """
    if n_jobs is None or n_jobs == 1:
        return min(joblib.cpu_count(), torch.get_num_threads())
    with joblib.parallel_config(backend="threading"):  # cores here, not workers of the caller's backend
        return joblib.effective_n_jobs(n_jobs)


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Call `function` on each item in up to `threads` threads, and return the results in the order of the items.

    Each call uses one thread of BLAS, because eigenvalues of large matrices depend on that number in their last bits.
    The first error in item order is raised, and so is an interrupt: calls that have not begun are skipped, running
    calls end first.
    """
    items = list(items)
    with one_thread():
        if min(threads, len(items)) <= 1:
            return [function(item) for item in items]
        gradients = torch.is_grad_enabled()  # a new thread starts with gradients enabled

        def call(item: Item) -> Result:
            with one_thread(), torch.set_grad_enabled(gradients):
                return function(item)

        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(call, items))
