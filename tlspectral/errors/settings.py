"""Check the settings of public functions: numbers, words, True and False, text, paths and lists.

A setting of another type would raise an error of Python, torch or pandas far below the user's call, without its name.
"""

import functools
import inspect
import operator
import os
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from tlspectral.errors import kind_of, shown

F = TypeVar("F", bound=Callable[..., Any])

_REFUSED = object()  # what a reader of settings returns for a value that it does not take
_NAME_BYTES, _PATH_BYTES = 255, 4096  # longest name in a folder, and longest path, of Linux


def checked_settings(function: F) -> F:
    """Return a public function that refuses a setting of the wrong type, in a message with the setting's name.

    The annotation of a parameter tells its type: int, float, bool, str, a path, words (`Literal`), a list, None, and
    unions of these. Parameters with any other annotation are not checked. Numbers of any library become Python's. Words
    are checked to be text, and the function itself checks that it knows them. A dataclass is returned with its
    constructor checked.
    """
    if isinstance(function, type):
        owner: Any = function
        owner.__init__ = _checked(owner.__init__, vars(sys.modules[owner.__module__]))
        return owner
    return _checked(function, inspect.unwrap(function).__globals__)


def _checked(function: Any, names: Mapping[str, Any]) -> Any:
    """Return `checked_settings` of a function. `names`: global names of its module, to read annotations."""
    signature = inspect.signature(function)

    @functools.cache
    def kinds() -> dict[str, list[Any]]:
        """Return a dict from each parameter to check to its types; read at the first call, when all names exist."""
        known = {name: _types_of(parameter.annotation, names) for name, parameter in signature.parameters.items()}
        return {name: listed for name, listed in known.items() if listed}

    @functools.wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        try:
            given = signature.bind(*args, **options)
        except TypeError:
            return function(*args, **options)  # Python's own message about missing and unknown arguments
        for name, listed in kinds().items():
            # A default may be of another type, such as one that marks a missing argument.
            if name in given.arguments and given.arguments[name] is not signature.parameters[name].default:
                given.arguments[name] = _read(name, given.arguments[name], listed)
        return function(*given.args, **given.kwargs)

    return called


def _types_of(annotation: Any, names: Mapping[str, Any]) -> list[Any]:
    """Return the types in an annotation, with words as a tuple; empty if any type is not a type of settings."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(names))
        except (NameError, TypeError, AttributeError):  # a name that only the type checker imports
            return []
    if get_origin(annotation) is Literal:
        return [get_args(annotation)]
    if get_origin(annotation) in (Union, types.UnionType):
        found = [_types_of(member, names) for member in get_args(annotation)]
        return [kind for kinds in found for kind in kinds] if all(found) else []
    origin = get_origin(annotation) or annotation
    if origin in (Iterable, Sequence, list, tuple):
        entries = get_args(annotation)[:1]
        of_text = not entries or bool({str, Any} & {*entries, *get_args(entries[0])})
        return [list if of_text else tuple]
    if origin in (os.PathLike, Path):
        return [os.PathLike]
    kinds = (bool, int, float, str, type(None))
    # torch is not imported here: its classes are known by their names.
    of_torch = str(annotation) in ("<class 'torch.device'>", "<class 'torch.dtype'>")
    return [origin] if origin in kinds or of_torch else []


def _read(name: str, value: Any, kinds: list[Any]) -> Any:
    """Return a setting as Python's own number or unchanged; raise an error if it has none of these types.

    `name`: the setting, for the message. `kinds`: types as `_types_of` returns them.
    """
    for kind in kinds:
        reader = _READERS.get(kind) or (_text if isinstance(kind, tuple) else None)
        read = reader(value) if reader else value if isinstance(value, kind) else _REFUSED
        if read is not _REFUSED:
            if os.PathLike in kinds and isinstance(value, str | os.PathLike):
                require_path(name, value)
            return read
    described = [_described(kind) for kind in kinds if kind is not str or os.PathLike not in kinds]
    message = f"{name}= must be {' or '.join(described)}; found {shown(value)}"
    raise TypeError(message) if os.PathLike in kinds else ValueError(message)


def _described(kind: Any) -> str:
    """Return a type of settings as text for a message, such as "a whole number"."""
    if isinstance(kind, tuple):
        return " or ".join(map(repr, kind))
    return _TEXTS.get(kind) or f"a torch.{kind.__name__}"


def require_path(name: str, path: str | os.PathLike[str]) -> None:
    """Raise ValueError if text is too long for a path, so that no system can open it. `name`: the setting's name."""
    text = os.fspath(path)
    if len(text.encode()) > _PATH_BYTES or any(len(part.encode()) > _NAME_BYTES for part in Path(text).parts):
        raise ValueError(f"{name}= must be the path of a file or folder; found text too long for one: {shown(text)}")


def pairs_in(name: str, given: Iterable[Any], expected: str) -> list[tuple[Any, Any]]:
    """Return the entries of a list of pairs.

    Raises ValueError for an entry that is not a pair. `name`: the setting's name; `expected`: what a pair is, such as
    "(sender, receiver)".
    """
    pairs = []
    for entry in given:
        sized = hasattr(entry, "__len__") and getattr(entry, "shape", None) != () and not isinstance(entry, str)
        if not sized or len(entry) != 2:
            raise ValueError(f"{name}= must be a list of pairs {expected}; found the entry {shown(entry)}")
        first, second = entry
        pairs.append((first, second))
    return pairs


def whole_number(value: Any) -> int | None:
    """Return an integer of any library, or a float without fraction, as an int; None for anything else."""
    if _is_truth(value):
        return None
    if isinstance(value, float) or (isinstance(value, Real) and not hasattr(value, "__index__")):
        return int(float(value)) if float(value).is_integer() else None
    if getattr(value, "ndim", 0):  # a tensor with one element would pass for a number
        return None
    number: Any = value
    try:
        return operator.index(number)
    except TypeError:
        return None


def counted(value: Any, least: int, what: str) -> int:
    """Return `value` as an int.

    Raises ValueError, which begins with `what`, unless it is a whole number from `least` up.
    """
    if (number := whole_number(value)) is None or number < least:
        raise ValueError(f"{what}, a whole number from {least} up; found {shown(value)}")
    return number


def _whole(value: Any) -> Any:
    """Return a whole number of any library as an int, otherwise `_REFUSED`."""
    return _REFUSED if (number := whole_number(value)) is None else number


def _number(value: Any) -> Any:
    """Return a number of any library as an int or a float, otherwise `_REFUSED`; True and False are not numbers."""
    if (number := whole_number(value)) is not None:
        return value if isinstance(value, int | float) else number
    scalar = getattr(value, "ndim", None) == 0 and "float" in str(getattr(value, "dtype", ""))
    return float(value) if scalar or (isinstance(value, Real) and not _is_truth(value)) else _REFUSED


def _truth(value: Any) -> Any:
    """Return True or False, of any library, as a bool, also for the numbers 0 and 1; otherwise `_REFUSED`."""
    return bool(value) if _is_truth(value) or (isinstance(value, int) and value in (0, 1)) else _REFUSED


def _is_truth(value: Any) -> bool:
    """Return True for True and False of any library, which are not numbers."""
    scalar = getattr(value, "ndim", None) == 0 and str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    return isinstance(value, bool) or scalar


def _text(value: Any) -> Any:
    """Return text unchanged, otherwise `_REFUSED`."""
    return value if isinstance(value, str) else _REFUSED


def _listed(value: Any) -> Any:
    """Return an object with entries unchanged, otherwise `_REFUSED`; models, tasks, parts and tables are refused."""
    known = kind_of(value) in ("a model", "a task", "a part", "a table")
    return _REFUSED if known or not hasattr(value, "__iter__") or getattr(value, "shape", None) == () else value


def _path(value: Any) -> Any:
    """Return text and paths unchanged, otherwise `_REFUSED`."""
    return value if isinstance(value, str | os.PathLike) else _REFUSED


_READERS: dict[Any, Callable[[Any], Any]] = {
    bool: _truth, int: _whole, float: _number, str: _text, list: _listed, os.PathLike: _path,
    tuple: lambda value: _REFUSED if isinstance(value, str) else _listed(value),
    type(None): lambda value: None if value is None else _REFUSED,
}  # fmt: skip
_TEXTS: dict[Any, str] = {
    bool: "True or False", int: "a whole number", float: "a number", str: "text", list: "a list", tuple: "a list",
    os.PathLike: "the path of a file or folder", type(None): "None",
}  # fmt: skip
