"""The type check of the tests: beartype, which sees the shapes that jaxtyping writes, at every call.

Inner functions that name no shape are left out. They are decorated anew each time their outer function runs, which took
a tenth of the time of all tests, and pyright knows their types.
"""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that checks its arguments and its result."""
    if "<locals>" in function.__qualname__ and not any(map(names_a_shape, function.__annotations__.values())):
        return function
    return beartype(function)


def names_a_shape(annotation: Any) -> bool:
    """Whether an annotation holds a type of jaxtyping, at any depth."""
    if isinstance(annotation, list):  # the arguments of a Callable
        return any(map(names_a_shape, annotation))
    is_shape = isinstance(annotation, type) and issubclass(annotation, AbstractArray)
    return is_shape or any(map(names_a_shape, get_args(annotation)))
