"""Modules of a model that are given a subclass of their own class, in place, and can be copied and pickled."""

from functools import cache
from typing import Any

from torch import nn

_OF_ITS_OWN = ("__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__")


class Swapped:
    """Methods and attributes that `swap` adds to a module, or puts in place of its own.

    `swap` makes a subclass of the module's class, `own`, with these in it, and gives it to the module. The subclass has
    one base: Python lets a module change to no class of another memory layout. A method calls what it replaces through
    `own`.
    """

    own: Any

    @classmethod
    def more(cls, own: type) -> dict[str, Any]:
        """Return further attributes of the subclass of one class."""
        return {}


def swap(module: nn.Module, kind: type[Swapped]) -> None:
    """Give a module, in place, a subclass of its own class with the attributes of `kind`."""
    module.__class__ = _joined(kind, type(module))


def swap_back(module: nn.Module) -> None:
    """Give a module and all in it their own classes again."""
    for part in module.modules():
        if is_swapped(part):
            part.__class__ = vars(type(part))["own"]


def is_swapped(module: Any, kind: type[Swapped] = Swapped) -> bool:
    """Return whether `swap` has given the module a class, of the given kind."""
    return issubclass(getattr(type(module), "swapped_kind", object), kind)


@cache
def _joined(kind: type[Swapped], own: type) -> type:
    attributes = {name: value for name, value in vars(kind).items() if name not in _OF_ITS_OWN}
    # The names stay: others look them up to know the kind of a module.
    attributes |= {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(
        own.__name__,
        (own,),
        {**attributes, **kind.more(own), "own": own, "swapped_kind": kind, "__reduce_ex__": _reduce},
    )


def _reduce(module: Any, protocol: Any) -> Any:
    own = type(module).own
    return _blank, (type(module).swapped_kind, own), *own.__reduce_ex__(module, protocol)[2:]


def _blank(kind: type[Swapped], own: type) -> Any:
    joined: Any = _joined(kind, own)
    return joined.__new__(joined)
