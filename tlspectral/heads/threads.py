"""Independent pieces of arithmetic on the CPU, shared among threads of this process, each with one thread of BLAS."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import joblib
import torch

from tlspectral.algebra.nulls import one_thread

Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_count(n_jobs: int | None) -> int:
    """Return how many threads share the work on a model that is loaded.

    For 1, the default of `n_jobs`, all cores that this process may use: the smaller of joblib's count, which knows
    affinity and the limits of a container, and torch's number of threads, which knows `OMP_NUM_THREADS` and
    `torch.set_num_threads`. Other numbers are counted as by joblib. Raises ValueError for 0.
    """
    if n_jobs is None or n_jobs == 1:
        return min(joblib.cpu_count(), torch.get_num_threads())
    with joblib.parallel_config(backend="threading"):  # of this machine, whatever backend the caller configured
        return joblib.effective_n_jobs(n_jobs)


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """Return what the function returns for each item, in order.

    LAPACK and large products release the interpreter lock. Every call has one thread of BLAS, because eigenvalues of
    matrices of 128 and more differ in their last bits with the number of these threads. The first error in the order of
    the items is raised, and so is an interrupt: calls that have not begun are then left out, and those that have are
    waited for.
    """
    items = list(items)
    with one_thread():
        if min(threads, len(items)) <= 1:
            return [function(item) for item in items]
        gradients = torch.is_grad_enabled()  # a new thread has them

        def call(item: Item) -> Result:
            with one_thread(), torch.set_grad_enabled(gradients):
                return function(item)

        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(call, items))
