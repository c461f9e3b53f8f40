"""Settings of every test: nothing asks a model hub, and torch uses one thread, the faster choice on tiny matrices."""

import os
import socket

import joblib
import pytest
import torch

# Modules of the tests whose asserts are to show their values, as those in test files do.
pytest.register_assert_rewrite("ablation_runs", "positional_measurements")

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


@pytest.fixture
def no_network(monkeypatch):
    """Any connection attempt fails the test at the line that makes it."""

    def refuse(*_, **__):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def dask_cluster():
    """A cluster of two processes, to which joblib sends its work while the test runs."""
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with (
        distributed.LocalCluster(**settings) as cluster,
        distributed.Client(cluster),
        joblib.parallel_config(backend="dask"),
    ):
        yield
