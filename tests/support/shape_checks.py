"""The type check of the tests: beartype, which sees the shapes that jaxtyping writes, at the first calls in each file.

Inner functions that name no shape are left out. They are decorated anew each time their outer function runs, which took
a tenth of the time of all tests, and pyright knows their types. Further calls of a function in a file of tests are
left out, since checks of every call took a third of the time of all tests.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray

CALLS = 10
"""How many calls of a function are checked in each file of tests. A call that is refused does not count."""

_passed: Counter[Callable[..., Any]] = Counter()
_left_out: set[Callable[..., Any]] = set()
_on = True


def check_again() -> None:
    """Begin a file of tests: the first calls of every function are checked."""
    _passed.clear()
    while _left_out:
        del _left_out.pop().__no_type_check__


@contextmanager
def not_checked() -> Iterator[None]:
    """A context in which what has a wrong type reaches the function, which is to refuse it in its own words."""
    global _on
    _on = False
    try:
        yield
    finally:
        _on = True


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the check of a signature, which jaxtyping calls before the function itself and after it."""
    if "<locals>" in function.__qualname__ and not any(map(names_a_shape, function.__annotations__.values())):
        return function

    @cache
    def check() -> Callable[..., Any]:
        return beartype(function)

    def counted(*given: Any, **named: Any) -> None:
        if not _on:
            return
        check()(*given, **named)
        _passed[check] += 1
        if _passed[check] == CALLS:
            # jaxtyping, whose frame this is called from, passes over a function with this mark of `typing`.
            wrapped = sys._getframe(1).f_locals["fn"]
            wrapped.__no_type_check__ = True
            _left_out.add(wrapped)

    return counted


def names_a_shape(annotation: Any) -> bool:
    """Whether an annotation holds a type of jaxtyping, at any depth."""
    if isinstance(annotation, list):  # the arguments of a Callable
        return any(map(names_a_shape, annotation))
    is_shape = isinstance(annotation, type) and issubclass(annotation, AbstractArray)
    return is_shape or any(map(names_a_shape, get_args(annotation)))
