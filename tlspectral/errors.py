"""Errors about models, heads and files.

Every message says which model, layer and role, what was found, and what to do about it.
"""

import difflib
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Frames between a caller and a function of this package: its own, the frames of `with`, and of what checks shapes.
_PASSED = {"tlspectral", "tlspectral_studies", "contextlib", "jaxtyping", "beartype"}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside this package that called it, however deep the call is."""
    level, frame = 1, sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def earlier_calls(*positional: str, **renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: the function also takes arguments as its earlier release did, and warns the caller.

    Args:
        positional: names of keyword-only parameters that earlier were the next positional ones, in their order.
        renamed: from the earlier keyword of a parameter to its name now.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(function).parameters.values()
        n_positional = sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
        first = next(iter(parameters))

        @wraps(function)
        def called(*args: P.args, **options: P.kwargs) -> R:
            arguments, keywords = list(args), dict(options)
            surplus = arguments[n_positional:]
            if positional and 0 < len(surplus) <= len(positional):
                del arguments[n_positional:]
                for name, value in zip(positional, surplus, strict=False):
                    if name in keywords:
                        raise TypeError(f"{function.__name__}() got multiple values for argument {name!r}")
                    keywords[name] = value
                    _warn_of_earlier(f"{function.__name__}: write {name}=, which is a keyword now")
            for earlier, now in renamed.items():
                # A function with **tables takes a further table of this name: only a missing argument is renamed.
                if earlier in keywords and now not in keywords and not (now == first.name and arguments):
                    value = keywords.pop(earlier)
                    if first.name == now and first.kind is first.POSITIONAL_ONLY:
                        arguments.insert(0, value)
                    else:
                        keywords[now] = value
                    _warn_of_earlier(f"{function.__name__}: {earlier}= is now called {now}=")
            return function(*arguments, **keywords)  # type: ignore[arg-type]

        return called

    return decorate


def _warn_of_earlier(message: str) -> None:
    warn_caller(f"{message}; the earlier call works in this version only", DeprecationWarning)


class UserBlock(ContextDecorator):
    """Base of contexts that a user opens by `with`: one that is dropped before it was ever entered warns.

    `unentered` is the text of the warning; None for no warning. `__enter__` sets `entered`.
    """

    unentered: str | None = None
    entered = False

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function, each call of which enters a context of its own."""
        self.entered = True
        return super().__call__(function)

    def __del__(self) -> None:
        """Warn where the block was forgotten."""
        if not self.entered and self.unentered is not None and not sys.is_finalizing():
            warn_caller(self.unentered)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return the end of a message, with the known name that is nearest to the given one; empty if none is near.

    Upper and lower case count alike.
    """
    names = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(given.casefold(), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def require_package(package: str, needed_for: str, install: str) -> None:
    """Raise ImportError where an optional package is missing; the message says what to install."""
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{needed_for} needs the package {package}: pip install {install}")


class TlspectralError(Exception):
    """Base of all errors of this package; the command line prints it as one line."""


class UnsupportedArchitecture(TlspectralError):
    """The attention of a layer is not a bilinear score that this package can read."""


class ScoreMismatch(TlspectralError):
    """The operators do not reproduce the model's own attention scores, so no number is returned."""


class EditNotHonored(TlspectralError):
    """A hook's edit did not change the model's output, or changed more than it should."""


class BadHead(TlspectralError, IndexError):
    """A layer or head that the model does not have, or an object that names no head."""


class BadWeights(TlspectralError, ValueError):
    """Weights that are NaN, infinite, quantised or not in memory."""


class IncompatibleCheckpoint(TlspectralError, ValueError):
    """A folder or file of results was made by other weights, tokens or settings."""


class MissingParts(TlspectralError):
    """Parts that other shards of a work make are not in its folder yet."""
