"""Functions that users pass in, such as parts, patterns, metrics and encoders: their arguments and their results.

The caller gives such a function copies, so that it may write into them. Its result is checked here, is never written to
and is not kept: a function may return the same tensor at every call.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor


def require_call(function: Callable[..., Any], arguments: Sequence[str], what: str) -> None:
    """Raise TypeError if a function cannot be called with these arguments, given by place.

    Args:
        function: the user's function.
        arguments: a name for each argument, for the message.
        what: the function, for the message, such as "metric".
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may not say what they take
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        *first, last = arguments or ["no arguments"]
        named = f"{', '.join(first)} and {last}" if first else last
        order = ", which it is given in this order" if first else ""
        raise TypeError(f"{what} is a function of {named}{order}; found {name}{signature}") from error


def real_tensor(values: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a dense tensor of real numbers that holds its numbers, on any device."""
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
    """Return the result of a user's function as a tensor, and raise unless its shape is exactly `shape`.

    Args:
        values: what the function returned.
        shape: the shape that it has to have.
        said: beginning of the message: the function and what it returns.
        kind: "real numbers" (whole numbers and True and False among them), "floating-point numbers" or "True and
            False".
        like: a tensor on the device that the result has to be on; floating-point numbers get its type. None: any.

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
    """Return where a tensor is NaN or infinite, as a mask of its shape; None if all its numbers are finite."""
    values = values.detach()
    if not values.is_floating_point() or bool(values.sum().isfinite()):  # one pass, and no mask in memory
        return None
    wrong = ~values.isfinite()
    return wrong if bool(wrong.any()) else None


def result_described(values: Any) -> str:
    """Return type and shape of a result, for a message."""
    if not isinstance(values, Tensor):
        shape, kind = getattr(values, "shape", None), type(values).__name__
        return kind if shape is None else f"shape {tuple(shape)} of {kind}"
    if values.layout is not torch.strided:
        return f"a tensor with the layout {values.layout}"
    return f"shape {tuple(values.shape)} of {values.dtype}" + (" without numbers (on meta)" if values.is_meta else "")
