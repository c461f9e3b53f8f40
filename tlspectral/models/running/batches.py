"""How large a batch is, by the device and all of its memory, and what is done where that is too much.

What else lies in the memory is not asked, so that a batch is the same in every run on a device. Numbers of batches of
other sizes differ by rounding alone. `attrs["batch"]` of a table says how many rows of tokens a pass had at most; it is
no setting, and tables of different batches are compared and resumed.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

import torch

from tlspectral.errors import warn_caller

_Found = TypeVar("_Found")


class Batch(NamedTuple):
    """What a pass may hold on a device.

    Attributes:
        tokens: of all its rows together.
        logits: numbers that are scored.
        held: bytes of activations that are kept beside the model's own, of which a run has up to three copies.
        copied: bytes of copies of a residual stream that one operation makes; on a CPU as much as its caches hold.
    """

    tokens: int
    logits: int
    held: int
    copied: int


# Measured on two cores: more tokens are no faster, and 2^26 logits are 256 MB in float32.
_ON_CPU = Batch(tokens=2**11, logits=2**26, held=2**29, copied=2**20)


def batch_on(device: torch.device) -> Batch:
    """Return the size of a batch on a device, by its total memory rounded down to a power of two."""
    if device.type in ("cuda", "xpu"):
        total = getattr(torch, device.type).get_device_properties(device).total_memory
    elif device.type == "mps":
        total = torch.mps.recommended_max_memory()
    else:
        return _ON_CPU
    memory = 2 ** (int(total).bit_length() - 1)
    return Batch(tokens=memory // 2**21, logits=memory // 2**6, held=memory // 2**3, copied=memory // 2**5)


def in_batches(n: int, at_once: int, run: Callable[[slice], _Found]) -> Iterator[_Found]:
    """Yield what `run` returns for one slice of n rows after the other, at most `at_once` rows in each.

    Where memory runs out, the batch and those behind it are halved, with a warning; one row that does not fit alone
    raises torch.OutOfMemoryError. `run` is then called again for some of the rows, so it changes nothing before its end
    that a second call does not overwrite.
    """
    first, warned = 0, False
    while first < n:
        rows = slice(first, min(first + at_once, n))
        try:
            found = run(rows)
        except torch.OutOfMemoryError:
            if rows.stop - rows.start == 1:
                raise
            at_once = (rows.stop - rows.start) // 2
        else:
            yield found
            del found
            first = rows.stop
            continue
        if not warned:
            warn_caller(
                "the device ran out of memory, so batches are halved until they fit: it takes longer, and numbers move "
                "by rounding alone"
            )
            warned = True
