"""Finds out whether matrices of all queries and keys of a prompt are made."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Squares"]


class Squares(TorchDispatchMode):
    """Notes operations that make tensors with two axes of `length` or more, in `found`."""

    __module__ = "torch.tests"  # modes of users run the model's own attention

    def __init__(self, length: int):
        super().__init__()
        self.length, self.found = length, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and sum(size >= self.length for size in result.shape) > 1:
            self.found.append((str(func), tuple(result.shape)))
        return result
