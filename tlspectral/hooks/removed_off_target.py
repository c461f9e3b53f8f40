"""The error for `off_target=`, an argument of earlier versions: it shows the calls that replace it."""

import inspect
import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from tlspectral.tasks import Task

P = ParamSpec("P")
R = TypeVar("R")

_LONGEST = 60
"""The error shows values up to this many characters. For a longer value it shows the name of the argument."""


def refuse_off_target(
    lines: Callable[[str, list[str]], str], **settings: Any
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: a call with the removed argument `off_target=` raises a TypeError that shows the new code.

    A call without this argument goes to the decorated function unchanged.

    Args:
        lines: function that returns the new code as text. It gets the call for one task as text, `tls.f(...,
            task=task)`, and the tasks as texts, the main task first.
        settings: arguments that the shown call has by default.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def checked(*positional: P.args, **options: P.kwargs) -> R:
            if "off_target" not in options:
                return function(*positional, **options)
            left = {name: value for name, value in options.items() if name != "off_target"}
            values = {**settings, **inspect.signature(function).bind_partial(*positional, **left).arguments}
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
    """Return the text of a task without quotes, to use as a keyword: `'language'` becomes `language`."""
    return task.strip("'")


def _arguments(function: Callable[..., Any], values: Mapping[str, Any]) -> str:
    """Return the arguments of a call of `function` as text, `model, 'rope_phase', heads='L0'`.

    `values` is a dict from the name of an argument to its value. Arguments that may be given by position are shown
    without their name. A long value is shown as the name of the argument.
    """
    arguments = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in values:
            text = repr(values[name])
            text = name if name == "model" or len(text) > _LONGEST or "\n" in text or "<" in text else text
            arguments.append(f"{name}={text}" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else text)
    return ", ".join(arguments)


def _as_code(task: Any) -> str:
    """Return a task as Python text: a task name in quotes, or for a `Task` a variable named after its label."""
    if isinstance(task, str):
        return repr(task)
    return re.sub(r"\W|^(?=\d)", "_", task.label) if isinstance(task, Task) else "other"
