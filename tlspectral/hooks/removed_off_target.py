"""`off_target=`, which sweeps and circuits took before: the error for a call with it shows the calls to write now."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tlspectral.tasks import Task

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST = 60
"""Characters of a value that the error shows. A longer one is shown as the name of its argument."""


def refuse_off_target(
    lines: Callable[[str, list[str]], str], **settings: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that `off_target=`, which is not an argument of it, raises a TypeError.

    Args:
        lines: returns the lines to write now, from the call for one task, `tls.f(..., task=task)`, and from the tasks
            as code, the target first.
        settings: arguments that the call shows where they were not given.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*given: P.args, **options: P.kwargs) -> R:
            if "off_target" not in options:
                return function(*given, **options)
            left = {name: value for name, value in options.items() if name != "off_target"}
            values = {**settings, **inspect.signature(function).bind_partial(*given, **left).arguments}
            others: Any = options["off_target"]
            tasks = [
                values.pop("task", "induction"),
                *(others if isinstance(others, list | tuple) and others else [others]),
            ]
            call = f"tls.{function.__name__}({_arguments(function, values)}, task=task)"
            raise TypeError(
                f"{function.__name__} has no off_target=: call it once for each task, with the same settings:\n"
                f"{lines(call, [_as_code(task) for task in tasks])}"
            )

        return checked

    return decorate


def keyword(task: str) -> str:
    """Return the keyword of a task that is written as code: `'language'` without its quotes."""
    return task.strip("'")


def _arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """Return the arguments of a call as code."""
    written = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in values:
            text = repr(values[name])
            text = name if name == "model" or len(text) > _LONGEST or "\n" in text or "<" in text else text
            written.append(f"{name}={text}" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else text)
    return ", ".join(written)


def _as_code(task: Any) -> str:
    """Return `'induction'` and `'language'` in quotes, a `Task` as a variable that is called by its name."""
    if isinstance(task, str):
        return repr(task)
    return re.sub(r"\W|^(?=\d)", "_", task.label) if isinstance(task, Task) else "other"
