"""Errors about models, heads and files.

Every message says which model, layer and role, what was found, and what to do about it.
"""

import difflib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ContextDecorator
from typing import Any

# Frames between a caller and a function of this package: its own, the frames of `with`, and of what checks shapes.
_PASSED = {"tlspectral", "tlspectral_studies", "contextlib", "jaxtyping", "beartype"}


def warn_caller(message: str) -> None:
    """Warn at the line outside this package that called it, however deep the call is."""
    level, frame = 1, sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


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
