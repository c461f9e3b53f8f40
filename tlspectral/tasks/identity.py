"""Digests of tasks: a folder of finished work stores them, and is refused for another task.

A digest is made from the content of prompts, answers and functions. It does not depend on addresses in memory, the
order of a set or line numbers, so two processes find the same digest for the same task.
"""

import dis
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from hashlib import sha256
from numbers import Number
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from tlspectral.models.reading.digests import digest_of_named, stored_bytes
from tlspectral.models.reading.packed import stored_weights
from tlspectral.models.running.batches import attention_positions
from tlspectral.tasks.task import Task
from tlspectral.tasks.task_sequences import TaskSequences

_OWN = {"tlspectral", "tlspectral_studies"}
_SHOWN = 16  # characters of a digest: a message also has to hold a name
_READS_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME")


def content_digest(value: Any) -> str:
    """Return the SHA-256 of the content of a value, as hex text: the same in every process for equal content.

    It covers type, shape and numbers of tensors and arrays, weights of models, vocabularies of tokenizers, and for
    other objects the state that pickle would store. For a function it covers qualified name, code, defaults, closure
    and the globals that the code reads; for an installed function only name and closure. Type checks by jaxtyping or
    beartype around a function are ignored. If an object cannot be pickled, only its type counts.
    """
    return _Contents([], {}).digest(value)


def is_own_code(value: Any) -> bool:
    """Return True if this project defines the class of a value; its settings then tell all that it computes."""
    return type(value).__module__.partition(".")[0] in _OWN


def task_identity(task: Task) -> dict[str, Any]:
    """Return a dict of digests of a task's prompts, metric, positions and pairs, before a model reads the prompts, so
    that two calls with the same task can be recognised.

    Keys: prompts, metric, predict, attention, positions, counterfactual. Values are text, None or such a dict, for
    JSON.
    """
    other = task.counterfactual
    return {
        "prompts": content_digest(task.prompts),
        "metric": _metric_identity(task, task.metric),
        **{name: _digest_or_none(getattr(task, name)) for name in ("predict", "attention", "positions")},
        "counterfactual": task_identity(other) if isinstance(other, Task) else _digest_or_none(other),
    }


def sequences_identity(sequences: TaskSequences, task: Task) -> dict[str, Any]:
    """Return a dict that identifies a task on one model, for JSON. `sequences`: the task's tokens and metric for this
    model.

    Keys: tokens (digest), metric (digest and name, with answers as ids), attention, named_positions, counterfactual.
    """
    attention = attention_positions(sequences.lengths, task.attention)
    pairs = sequences.counterfactual
    return {
        "tokens": sequences.digest,
        "metric": _metric_identity(task, sequences.metric),
        "attention": None if attention is None else attention.tolist(),
        "named_positions": {name: places.tolist() for name, places in sequences.positions.items()},
        "counterfactual": None if pairs is None else pairs.hashed(),
    }


def _digest_or_none(value: Any) -> str | None:
    """Return the content digest of a value, or None for None."""
    return None if value is None else content_digest(value)


def _metric_identity(task: Task, metric: Any) -> str:
    """Return "DIGEST NAME" for a metric: 16 digits of its content digest, and the name of its function or class.

    `task`: the task of the metric. `metric`: the task's metric, or the metric that it gives for one model. The name is
    taken from the task's.
    """
    name = getattr(task.metric, "__name__", type(task.metric).__name__)
    return f"{content_digest(metric)[:_SHOWN]} {name}"


@dataclass
class _Contents:
    """One recursive walk through a value, which computes its digest.

    Attributes:
        open: values that contain the current one, innermost last. A value that contains itself ends the walk.
        done: finished values and their digests, by address. Values are kept, so no new object gets a known address.
    """

    open: list[Any]
    done: dict[int, tuple[Any, str]]

    def digest(self, value: Any) -> str:
        """Return the SHA-256 of a value, as hex text, and store it in `done`; for a value inside itself, return a text
        that names the depth.
        """
        if id(value) in self.done:
            return self.done[id(value)][1]
        for depth, outer in enumerate(reversed(self.open)):
            if outer is value:
                return f"the value {depth} levels up"
        self.open.append(value)
        kind, pieces = self._pieces(value)
        digest = sha256(kind.encode())
        for piece in pieces:
            data = piece if isinstance(piece, bytes | memoryview) else self.digest(piece).encode()
            digest.update(f" {len(data)}:".encode())
            digest.update(data)
        self.open.pop()
        self.done[id(value)] = value, digest.hexdigest()
        return digest.hexdigest()

    def _pieces(self, value: Any) -> tuple[str, Iterable[Any]]:
        """Return the kind of a value, such as "tensor", and its content.

        The content is an iterable of bytes and of further values, which `digest` digests in turn.
        """
        if value is None or isinstance(value, bool | np.bool_):
            return "constant", [str(value).encode()]
        if isinstance(value, str):
            return "text", [value.encode("utf-8", "surrogatepass")]
        if isinstance(value, Number | np.generic):
            plain = value.item() if isinstance(value, np.generic) else value
            return type(plain).__name__, [repr(plain).encode()]
        if isinstance(value, bytes | bytearray):
            return "bytes", [bytes(value)]
        if isinstance(value, Tensor):
            return "tensor", [f"{value.dtype} {tuple(value.shape)}".encode(), memoryview(stored_bytes(value))]
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return "array", [f"{value.dtype.str} {value.shape}".encode(), value.tobytes()]
        if isinstance(value, np.ndarray):
            return "objects", [str(value.shape).encode(), value.ravel().tolist()]
        if isinstance(value, pd.Index):
            return "index", [list(value.names), value.tolist()]
        if isinstance(value, pd.Series):
            return "series", [value.name, value.index, value.tolist()]
        if isinstance(value, pd.DataFrame):
            return "frame", [value.columns, *(value.iloc[:, place] for place in range(value.shape[1]))]
        if isinstance(value, nn.Module):
            weights = dict(value.named_parameters()) | dict(value.named_buffers())
            return "model", [type(value), digest_of_named(stored_weights(weights)).encode()]
        return self._python_pieces(value)

    def _python_pieces(self, value: Any) -> tuple[str, Iterable[Any]]:
        """Return the kind of a value, such as "mapping", and its content, for containers, functions, classes and
        objects.

        The content is an iterable of bytes and of further values to digest.
        """
        if isinstance(value, Mapping):
            return "mapping", sorted(self.digest([key, item]).encode() for key, item in value.items())
        if isinstance(value, set | frozenset):
            return "set", sorted(self.digest(member).encode() for member in value)
        if isinstance(value, tuple | list):
            return "sequence", value
        if isinstance(value, partial):
            return "partial", [value.func, value.args, value.keywords]
        if isinstance(value, MethodType):
            return "method", [value.__func__, value.__self__]
        if isinstance(value, FunctionType):
            return "function", _of_function(value)
        if isinstance(value, CodeType):
            # Line numbers and names of variables are left out: they do not change what the code computes.
            sizes = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags)
            return "code", [value.co_code, sizes, value.co_consts, value.co_names]
        if isinstance(value, type):
            return "class", _of_class(value)
        if isinstance(value, ModuleType):
            return "module", [value.__name__.encode()]
        if hasattr(value, "get_vocab"):
            return "tokenizer", [type(value), value.get_vocab()]
        return "object", _of_object(value)


def _of_function(function: FunctionType) -> list[Any]:
    """Return a list of the values that identify a function: name, defaults, closure, code and the globals that it
    reads.

    An installed function gives only its name and closure; a wrapper that checks types gives the wrapped function.
    """
    # A wrapper of jaxtyping or beartype checks types and computes nothing else; beartype generates its code.
    checks_types = str(function.__globals__.get("__name__")).startswith("jaxtyping.")
    checks_types |= function.__code__.co_filename.startswith("<@beartype(")
    wrapped = getattr(function, "__wrapped__", None)
    if checks_types and wrapped is not None:
        return _of_function(wrapped)
    installed = _installed(function.__module__)
    if installed and getattr(sys.modules.get(function.__module__), function.__qualname__, None) is function:
        return [function.__module__, function.__qualname__]
    pieces: list[Any] = [function.__qualname__, function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a name that is not bound yet
            pieces.append(cell.cell_contents)
    if installed:
        return [function.__module__, *pieces]
    return [*pieces, function.__code__, *_globals_read(function)]


def _globals_read(function: FunctionType) -> list[Any]:
    """Return names and values of the globals that a function reads, as a list.

    For a module of the user's own it adds the attributes that the function uses.
    """
    read: set[str] = set()
    attributes: set[str] = set()  # every name in the code, so also attributes
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        read |= {step.argval for step in dis.get_instructions(code) if step.opname in _READS_GLOBALS}
        attributes |= {*code.co_names}
        waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    pieces: list[Any] = []
    for name in sorted(read & function.__globals__.keys()):  # others are builtins
        value = function.__globals__[name]
        pieces += [name, value]
        if isinstance(value, ModuleType) and not _installed(value.__name__):
            pieces += [[used, vars(value)[used]] for used in sorted(attributes & vars(value).keys())]
    return pieces


def _of_class(kind: type) -> list[Any]:
    """Return a list of the values that identify a class: for a user's class its name, bases and members, for an
    installed class its module and name.
    """
    if _installed(kind.__module__):
        return [kind.__module__, kind.__qualname__]
    pieces: list[Any] = [kind.__qualname__, kind.__bases__]
    for name, held in sorted(vars(kind).items()):
        made_by_python = name == "_abc_impl" or hasattr(held, "__objclass__")
        if isinstance(held, staticmethod | classmethod):
            held = held.__func__
        elif isinstance(held, property):
            held = [held.fget, held.fset, held.fdel]
        if not made_by_python and (not name.startswith("__") or isinstance(held, FunctionType)):
            pieces += [name, held]
    return pieces


def _of_object(value: Any) -> list[Any]:
    """Return a list of the values that identify an object: its type or constructor and the state that pickle would
    store; only its type if it cannot be pickled.
    """
    wrapped = getattr(value, "__wrapped__", None)  # the function inside functools.cache
    try:
        stored = value.__reduce_ex__(4)
    except Exception:  # it cannot be pickled: a lock, a generator, an open file
        return [type(value), wrapped]
    if isinstance(stored, str):
        return [type(value), stored, wrapped]
    make, arguments, state, items, pairs = (*stored, None, None, None)[:5]
    return [make, arguments, state, *(None if part is None else list(part) for part in (items, pairs)), wrapped]


@cache
def _installed(module: str | None) -> bool:
    """Return True if a module belongs to Python, this project or an installed package, whose code counts as unchanging.

    `module`: dotted name, or None.
    """
    top = (module or "").partition(".")[0]
    if top in sys.stdlib_module_names or top in _OWN:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}
    return file is not None and any(Path(folder) in Path(file).parents for folder in folders)
