"""Settings of every test: nothing asks a model hub, and torch uses one thread, the faster choice on tiny matrices."""

import os
import socket

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


@pytest.fixture
def no_network(monkeypatch):
    """Any connection attempt fails the test at the line that makes it."""

    def refuse(*_, **__):
        raise AssertionError("a connection was attempted")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
