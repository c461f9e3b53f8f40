"""Checks in the hooks of a pass, which wait until it ends, so that a GPU is not waited for at every hook."""

from collections.abc import Callable, Iterator
from threading import get_ident
from typing import NamedTuple

import torch
from torch import Tensor

from tlspectral.models.hooking.interrupts import undoing, uninterrupted


class _Check(NamedTuple):
    """Numbers of a pass, and a function that is given them on the CPU and may raise."""

    numbers: tuple[Tensor, ...]
    judge: Callable[..., object]


_waiting: dict[int, list[_Check]] = {}  # by thread


@uninterrupted
def checked_at_end() -> Iterator[None]:
    """Make the checks of a pass wait until the context ends: nothing of the pass may be handed on inside it.

    An error of the pass is raised behind the errors of its checks, as what a check refuses can be why the pass failed.
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
    """Give numbers to `judge`, on the CPU: at the end of a pass of `checked_at_end`, else now."""
    check = _Check(tuple(one.detach() for one in numbers), judge)
    waiting = _waiting.get(get_ident())
    if waiting is None:
        _judge([check])
    else:
        waiting.append(check)


def _wait_as_before(thread: int, before: list[_Check] | None) -> None:
    if before is None:
        _waiting.pop(thread, None)
    else:
        _waiting[thread] = before


def _judge(checks: list[_Check]) -> None:
    """Run checks in their order; the numbers of one device and type are copied at once."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for check in checks:
        for one in check.numbers:
            kinds.setdefault((one.device, one.dtype), []).append(one)
    copied: dict[int, Tensor] = {}
    for numbers in kinds.values():
        flat = torch.cat([one.flatten() for one in numbers]).cpu()
        for one, part in zip(numbers, flat.split([one.numel() for one in numbers]), strict=True):
            copied[id(one)] = part.view(one.shape)
    for check in checks:
        check.judge(*(copied[id(one)] for one in check.numbers))
