"""SHA-256 of tensors as they are stored, by which tables name the weights and tokens that they were made from."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


def digest_of(values: Iterable[Tensor | None]) -> str:
    """Return the SHA-256 of the bytes of tensors as stored, in order; None is skipped."""
    digest = hashlib.sha256()
    for value in values:
        if value is not None:
            digest.update(stored_bytes(value))
    return digest.hexdigest()


def digest_of_named(values: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of named tensors, in the order of their names, with name, shape and type of each."""
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(stored_bytes(value))
    return digest.hexdigest()


def stored_bytes(value: Tensor) -> Any:
    """Return the bytes of a tensor as stored, for a hash; a tensor on the CPU is not copied."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
