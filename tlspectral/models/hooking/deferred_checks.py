"""Delay the checks made in the hooks of a pass until the pass ends, because each check would wait for a GPU."""

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from tlspectral.models.hooking.interrupts import undoing, uninterrupted


class _Check(NamedTuple):
    """A delayed check.

    numbers: tensors of the pass.
    judge: function of these tensors on the CPU; it may raise.
    """

    numbers: tuple[Tensor, ...]
    judge: Callable[..., object]


_waiting: dict[int, list[_Check]] = {}  # by thread


@uninterrupted
def checked_at_end() -> Iterator[None]:
    """Delay the checks of a pass until the `with` block ends. Do not use results of the pass inside the block.

    If the pass itself fails, errors of its checks are raised first, because they can name the cause.
    """
    thread = get_ident()
    checks: list[_Check] = []
    with undoing(_wait_as_before, thread, _waiting.get(thread)):
        _waiting[thread] = checks
        try:
            yield
        except Exception:
            _judge(checks)
            raise
    _judge(checks)


def judged(numbers: tuple[Tensor, ...], judge: Callable[..., object]) -> None:
    """Call `judge(*numbers)` with the numbers on the CPU: at the end of an open `checked_at_end` block, else now."""
    check = _Check(tuple(number.detach() for number in numbers), judge)
    waiting = _waiting.get(get_ident())
    if waiting is None:
        _judge([check])
    else:
        waiting.append(check)


def _wait_as_before(thread: int, before: list[_Check] | None) -> None:
    """Set the waiting checks of a thread back to the checks before a `checked_at_end` block.

    thread: id of the thread. before: the list of earlier checks; None if no block was open.
    """
    if before is None:
        _waiting.pop(thread, None)
    else:
        _waiting[thread] = before


def _judge(checks: list[_Check]) -> None:
    """Run checks in order, each on its numbers on the CPU. Numbers of one device and type are copied together.

    Raises what the first failing check raises.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for check in checks:
        for number in check.numbers:
            kinds.setdefault((number.device, number.dtype), []).append(number)
    copied: dict[int, Tensor] = {}
    for numbers in kinds.values():
        flat = torch.cat([number.flatten() for number in numbers]).cpu()
        for number, part in zip(numbers, flat.split([number.numel() for number in numbers]), strict=True):
            copied[id(number)] = part.view(number.shape)
    for check in checks:
        check.judge(*(copied[id(number)] for number in check.numbers))
