"""Call functions that users pass in, such as parts, patterns, metrics and encoders, and check their results.

Such a function gets copies, so it may write into its arguments. Its result is checked, never written to and not kept,
because a function may return the same tensor at every call. Errors name the function and what it should return.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

_OWN = ("tlspectral", "tlspectral_studies")  # errors of functions of this project need no further name


def require_call(function: Callable[..., Any], arguments: Sequence[str], what: str) -> None:
    """Raise TypeError if a user's function cannot be called with a given number of positional arguments.

    Args:
        function: the user's function.
        arguments: a name for each argument, for the message; their number is checked.
        what: the role of the function, for the message, such as "metric".
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may not have a signature
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        *first, last = arguments or ["no arguments"]
        named = f"{', '.join(first)} and {last}" if first else last
        order = ", in this order" if first else ""
        name, parameters = function_name(function), " ".join(str(signature).split())[:100]
        raise TypeError(f"{what} is a function of {named}{order}; found {name}{parameters}") from error


def function_name(function: Any) -> str:
    """Return the name of a user's function for messages: "Class.method" for a method, the class's name for an object
    with `__call__`.
    """
    inner = getattr(function, "func", None)  # functools.partial
    if inner is not None and not hasattr(function, "__name__"):
        return function_name(inner)
    name, owner = getattr(function, "__name__", None), getattr(function, "__self__", None)
    if name is None:
        return type(function).__name__
    return name if owner is None or inspect.ismodule(owner) else f"{type(owner).__name__}.{name}"


def call_users(function: Callable[..., Any], arguments: Mapping[str, Any], what: str, returns: str) -> Any:
    """Call a user's function and return its result; if it raises, raise an error that names the function.

    Args:
        function: the user's function.
        arguments: its arguments by name, in the order in which they are passed. The names are for the message.
        what: the function in messages, such as "the metric my_metric".
        returns: what it should return, such as "a tensor of real numbers of shape (3,)".

    Raises:
        ValueError: the function raised a RuntimeError or IndexError, as torch does.
        Exception: another error of the function, with its own class. A lack of memory passes unchanged.
    """
    if str(getattr(function, "__module__", "")).partition(".")[0] in _OWN:
        return function(*arguments.values())
    try:
        return function(*arguments.values())
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        given = ", ".join(f"{name} {_size(value)}" for name, value in arguments.items())
        reason = " ".join(str(error).split())[:200]
        message = f"{what} raised {type(error).__name__}: {reason}. It got {given}, and should return {returns}"
        if isinstance(error, RuntimeError | IndexError):
            raise ValueError(message) from error
        try:
            named = type(error)(message)
        except Exception:  # a class of the user with other arguments
            named = ValueError(message)
        raise named from error


def _size(value: Any) -> str:
    """Return text about an argument's value for a message: "of shape (2, 3)", or its type in brackets."""
    shape = getattr(value, "shape", None)
    return f"of shape {tuple(shape)}" if isinstance(shape, tuple) else f"({type(value).__name__})"


def real_tensor(values: Any) -> TypeGuard[Tensor]:
    """Return True for a dense tensor of real numbers (also bool and integers) on any device except meta."""
    return (
        isinstance(values, Tensor)
        and values.layout is torch.strided
        and not values.is_meta
        and not values.is_complex()
        and not values.is_quantized
    )


def returned_tensor(
    values: Any, shape: tuple[int, ...], said: str, *, kind: str = "real numbers", like: Tensor | None = None
) -> Tensor:
    """Return the result of a user's function, not copied, after checking type, shape and device.

    Args:
        values: the result.
        shape: the shape that it must have.
        said: beginning of the message: the function and what it should return.
        kind: "real numbers" (also whole numbers, True and False), "floating-point numbers" or "True and False".
        like: a tensor on the required device; a floating-point result is converted to its dtype. None: any device.

    Raises:
        ValueError: another type, dtype, shape or device.
    """
    fits = real_tensor(values) and tuple(values.shape) == tuple(shape)
    if fits and kind == "floating-point numbers":
        fits = values.is_floating_point()
    elif fits and kind == "True and False":
        fits = values.dtype is torch.bool
    if not fits:
        raise ValueError(f"{said}, a tensor of {kind} of shape {tuple(shape)}; found {result_described(values)}")
    if like is None:
        return values
    if values.device != like.device:
        raise ValueError(
            f"{said}, a tensor on {like.device}; found one on {values.device}: add .to({str(like.device)!r})"
        )
    return values.to(like.dtype) if values.is_floating_point() else values


def not_finite(values: Tensor) -> Tensor | None:
    """Return a boolean mask in the shape of `values`, True at NaN and infinite numbers; None if all numbers are
    finite.
    """
    values = values.detach()
    if not values.is_floating_point() or bool(values.sum().isfinite()):  # one pass, and no mask in memory
        return None
    wrong = ~values.isfinite()
    return wrong if bool(wrong.any()) else None


def result_described(values: Any) -> str:
    """Return shape and dtype, or type, of a function's result as text for a message, such as "shape (3,) of
    torch.float32".
    """
    if not isinstance(values, Tensor):
        shape, kind = getattr(values, "shape", None), type(values).__name__
        return kind if shape is None else f"shape {tuple(shape)} of {kind}"
    if values.layout is not torch.strided:
        return f"a tensor with the layout {values.layout}"
    return f"shape {tuple(values.shape)} of {values.dtype}" + (" without numbers (on meta)" if values.is_meta else "")
