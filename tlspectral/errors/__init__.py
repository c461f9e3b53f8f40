"""Errors and warnings of this package, and how their messages print a value.

A message names the model, layer and role, says what was found, and what to type instead.
"""

import difflib
import importlib.util
import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ContextDecorator
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Modules whose frames can lie between the user's line and a function of this package: its own, `with`, shape checks.
_PASSED = {"tlspectral", "tlspectral_studies", "contextlib", "jaxtyping", "beartype"}


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning of the class `category` that points to the user's own line: the innermost line of the call stack
    outside this package.
    """
    level, frame = 1, sys._getframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def earlier_calls(*positional: str, **renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator; its functions also take arguments as in an earlier release, with a DeprecationWarning.

    Args:
        positional: names of keyword-only parameters that used to be positional, in their order behind the positional
            parameters.
        renamed: `old="new"` for each parameter whose keyword has changed.
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
                        raise TypeError(
                            f"{function.__name__}() got multiple values for argument {name!r}: give it once, as {name}="
                        )
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
    """Give a DeprecationWarning that points to the user's line: `message`, then "; the earlier call works in this
    version only".
    """
    warn_caller(f"{message}; the earlier call works in this version only", DeprecationWarning)


class UserBlock(ContextDecorator):
    """Base of objects that a user opens by `with`. It warns if such an object is deleted and was never opened.

    Attributes:
        unentered: text of the warning; None for no warning.
        entered: True once the block was opened; `__enter__` sets it.
    """

    unentered: str | None = None
    entered = False

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `function` that opens this block for every call; the warning is switched off."""
        self.entered = True
        return super().__call__(function)

    def __del__(self) -> None:
        """Give the warning `unentered` if this object was never opened by `with`."""
        if not self.entered and self.unentered is not None and not sys.is_finalizing():
            warn_caller(self.unentered)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" with the name in `known` that is nearest to `given`, or "" if none is near.

    Case is ignored.
    """
    name = nearest(given, known)
    return "" if name is None else f"; did you mean {name!r}?"


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` that is nearest to `given`, without regard to case; None if none is near."""
    names = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(given.casefold(), names, n=1)
    return names[near[0]] if near else None


_LONGEST = 160
"""Characters of a value in a message: two lines of a narrow terminal."""
_FIRST = 3  # entries of a long container that a message shows


def shown(value: Any, most: int = _LONGEST) -> str:
    """Return any value as text for a message, on one line of at most `most` characters, cut by " ...".

    Short values are written as Python does. Arrays, frames, models and long containers are named by type and size.
    """
    try:
        text = " ".join(_described(value).split())
    except Exception:  # the user's own `__repr__` can fail
        text = f"a {type(value).__name__}"
    return text if len(text) <= most else text[: most - 4] + " ..."


def _described(value: Any) -> str:
    """Return any value as text for a message: short values by `repr`, arrays, frames, models and long containers by
    type and size.

    It may still have line breaks and be long; `shown` removes these.
    """
    kind, shape = type(value).__name__, getattr(value, "shape", None)
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= 120 else f"{value[:100]!r} ... ({len(value):,} characters)"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if hasattr(value, "named_parameters"):
        return f"a {kind}"
    columns = getattr(value, "columns", None)
    if columns is not None and not callable(columns) and hasattr(value, "__len__"):
        names = ", ".join(str(name) for name in list(columns)[:_FIRST])
        return f"a {kind} of {len(value):,} rows with columns {names}{', ...' * (len(columns) > _FIRST)}"
    if isinstance(shape, tuple) and len(shape):
        # Few numbers are written out: printing a large array would take seconds.
        small = all(isinstance(size, int) for size in shape) and math.prod(shape) <= 16
        return repr(value) if small else f"a {kind} of shape {tuple(shape)} of {getattr(value, 'dtype', 'objects')}"
    if isinstance(value, Mapping) and len(value) > 2 * _FIRST:
        first = ", ".join(f"{shown(key, 20)}: {shown(value[key], 20)}" for key in list(value)[:_FIRST])
        return f"{{{first}, ...}} ({kind} of {len(value):,} entries)"
    if isinstance(value, list | tuple | Set) and len(value) > 2 * _FIRST:
        start, end = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        first = ", ".join(shown(entry, 30) for entry, _ in zip(value, range(_FIRST), strict=False))
        return f"{start}{first}, ...{end} ({kind} of {len(value):,} entries)"
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        entries = ", ".join(shown(entry, 60) for entry in value)
        return f"[{entries}]" if isinstance(value, list) else f"({entries}{',' * (len(value) == 1)})"
    if callable(value) and hasattr(value, "__name__"):
        return f"the function {value.__name__}"
    return repr(value)


def public_call() -> str:
    """Return the public function that the user called, such as "ablate(model, heads, part)"; "" if none.

    Messages about swapped arguments end with it, because they are raised far below that function.
    """
    frame, call = sys._getframe(), ""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED:
        module, code = str(frame.f_globals.get("__name__")), frame.f_code
        names = [name for name in code.co_varnames[: code.co_argcount] if name not in ("self", "cls")]
        name = code.co_name
        if name in ("__init__", "__post_init__", "__new__") and code.co_argcount:
            name = type(frame.f_locals[code.co_varnames[0]]).__name__
        if module.startswith("tlspectral.cli"):  # the user typed a command, not this function
            return ""
        if module.startswith("tlspectral.") and names and not name.startswith(("_", "<")):
            call = f"{name}({', '.join(names)})"  # the outermost such function wins
        frame = frame.f_back
    return call


WHOLE_NUMBERS = "whole numbers, such as token ids"
_KINDS_OF_NAMES = {
    "a head": r"L?-?\d+[H.]-?\d+",
    "all heads of a layer": r"L-?\d+",
    "a key/value group": r"L?-?\d+KV-?\d+",
    "a receiver": r"L?-?\d+(H|\.|KV)-?\d+\.[qkv]|L?-?\d+\.?MLP|logits",
    "a part": r"(anti)?symmetric(_static)?|rope_phase|output|M_S|M_A|Im\(M_t\)",
    "a task": "induction|language",
    "the file of a table": r".*\.(parquet|csv)",
}
"""Regular expressions for names that users write, by the kind of argument that they are."""
_PLURALS = {"a head": "heads", "a receiver": "receivers", "a part": "parts", WHOLE_NUMBERS: WHOLE_NUMBERS}


def kind_of(value: Any) -> str:
    """Return which kind of argument a value is, such as "a model", "a part" or "a head"; "" if it is not recognised.

    It is for messages about swapped arguments. Objects are recognised by their attributes, so nothing is imported.
    """
    if isinstance(value, type):
        return ""
    if isinstance(value, str):
        return _kind_of_text(value)
    for kind, attributes in (
        ("a model", ("run_with_hooks",)),
        ("a model", ("named_parameters",)),
        ("a model", ("only_weights",)),
        ("a task", ("metric", "prompts")),
        ("a part", ("acts_on", "settings")),
        ("the value of a task", ("per_sequence",)),
        ("a dictionary of features", ("decoder", "encode")),
        ("a prompt in blocks", ("prefix", "blocks", "suffix")),
        ("a table", ("columns", "dtypes")),
        ("a table", ("column_names", "schema")),
        ("a receiver", ("layer", "head", "input", "shared")),
    ):
        if all(hasattr(value, attribute) for attribute in attributes):
            return kind
    if callable(value):
        return "a function"
    if isinstance(value, Mapping):
        return "a tokenizer's batch" if "input_ids" in value else ""
    if isinstance(value, list | tuple | Set):
        return _kind_of_entries(value)
    dtype = str(getattr(value, "dtype", "")) if getattr(value, "ndim", 0) else ""
    return WHOLE_NUMBERS if "int" in dtype else "numbers" if "float" in dtype else ""


def _kind_of_text(text: str) -> str:
    """Return which kind of argument a text is: the name of a head, layer, receiver, part, ready task or file, or a
    prompt.
    """
    name = text[:200].strip()
    for kind, names in _KINDS_OF_NAMES.items():
        if re.fullmatch(names, name, re.IGNORECASE):
            return kind
    return "text, such as a prompt" if " " in name else ""


def _kind_of_entries(values: Iterable[Any]) -> str:
    """Return which kind of argument a list, tuple or set is, such as "heads" or "texts, such as prompts", by its first
    entries; "" if it is not recognised.
    """
    entries = [entry for entry, _ in zip(values, range(8), strict=False)]
    numbers = [isinstance(entry, int) and not isinstance(entry, bool) for entry in entries]
    if entries and all(numbers):
        return "a head" if len(entries) == 2 and isinstance(values, list | tuple) else WHOLE_NUMBERS
    if entries and all(isinstance(entry, str) for entry in entries):
        kinds = {_kind_of_text(entry) for entry in entries}
        return _PLURALS.get(kinds.pop(), "texts, such as prompts") if len(kinds) == 1 else "texts, such as prompts"
    if entries and all(isinstance(entry, list | tuple) and len(entry) for entry in entries):
        kinds = {_kind_of_entries(entry) for entry in entries}
        return _PLURALS.get(kinds.pop(), "") if len(kinds) == 1 else ""
    return ""


def not_a(value: Any, expected: str) -> str:
    """Return the beginning of a message: "VALUE is a part, not EXPECTED; check the order of the arguments of CALL".

    `expected`: what the argument should be, such as "a head". CALL is the public function with its arguments. For a
    value that is not recognised the text is "VALUE is not EXPECTED", or "VALUE names no head" (also for receivers).
    """
    kind, noun = kind_of(value), expected.removeprefix("a ")
    verb = "is" if kind.startswith(("a ", "all ", "the ", "text,")) else "are"
    if kind in ("", expected):
        named = noun.rstrip("s") in ("head", "receiver")
        return f"{shown(value)} {'names no ' + noun if named else 'is not ' + expected}"
    if kind.split()[-1].rstrip("s") in ("head", "receiver", "layer", "group") and noun.rstrip("s") in (
        "head",
        "receiver",
    ):
        return f"{shown(value)} {verb} {kind}, not {expected}"  # the right argument in another form
    call = public_call()
    return f"{shown(value)} {verb} {kind}, not {expected}; check the order of the arguments{' of ' * bool(call)}{call}"


def require_package(package: str, needed_for: str, install: str) -> None:
    """Raise ImportError if an optional package is missing.

    `package`: name to import. `needed_for`: what needs it, the beginning of the message. `install`: argument of pip
    install.
    """
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{needed_for} needs the package {package}: pip install {install}")


class TlspectralError(Exception):
    """Base of the errors of this package. The command line prints them as one line."""


class UnsupportedArchitecture(TlspectralError):
    """The attention of a layer or model is of a kind that this package cannot read."""


class ScoreMismatch(TlspectralError):
    """The operators do not reproduce the model's own attention scores, so no result is returned."""


class EditNotHonored(TlspectralError):
    """An edit by a hook did not change the model's output, or changed more than it should."""


class BadHead(TlspectralError, IndexError):
    """A layer or head does not exist in the model, or an argument is not a head."""


class BadWeights(TlspectralError, ValueError):
    """Weights are NaN, infinite, quantised, incomplete, damaged or not in memory."""


class IncompatibleCheckpoint(TlspectralError, ValueError):
    """A folder or file of results was made with other weights, tokens or settings."""


class MissingParts(TlspectralError):
    """Jobs of other shards are not in the folder of a measurement yet."""
