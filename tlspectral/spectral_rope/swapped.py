"""Give modules a subclass of their own class, in place, such that they can still be copied and pickled."""

from functools import cache
from typing import Any

from torch import nn

_OF_ITS_OWN = ("__dict__", "__weakref__", "__module__", "__doc__", "__qualname__", "__annotations__")


class Swapped:
    """Base of classes whose methods and attributes `swap` puts on a module, in place of the module's own.

    `swap` makes a subclass of the module's class `own` with these attributes and assigns it to the module. A method
    calls the method that it replaces through `own`.
    """

    own: Any

    @classmethod
    def more(cls, own: type) -> dict[str, Any]:
        """Return a dict of further attributes for the subclass of the class `own`; empty by default."""
        return {}


def swap(module: nn.Module, kind: type[Swapped]) -> None:
    """Change the class of a module in place, to a subclass of its own class with the attributes of `kind`. Weights
    stay.
    """
    module.__class__ = _joined(kind, type(module))


def swap_back(module: nn.Module) -> None:
    """Give a module and all its submodules their original classes again, in place."""
    for part in module.modules():
        if is_swapped(part):
            part.__class__ = vars(type(part))["own"]


def is_swapped(module: Any, kind: type[Swapped] = Swapped) -> bool:
    """Return True if `swap` has changed the class of a module, by this `kind` or a subclass of it."""
    return issubclass(getattr(type(module), "swapped_kind", object), kind)


@cache
def _joined(kind: type[Swapped], own: type) -> type:
    """Return the subclass of `own` (a module's class) with the methods and attributes of `kind`; equal arguments give
    the same class.
    """
    attributes = {name: value for name, value in vars(kind).items() if name not in _OF_ITS_OWN}
    # Python lets a module change only to a class of the same memory layout, so the subclass has one base.
    # Its names stay, because other code tells modules apart by class name.
    attributes |= {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(
        own.__name__,
        (own,),
        {**attributes, **kind.more(own), "own": own, "swapped_kind": kind, "__reduce_ex__": _reduce},
    )


def _reduce(module: Any, protocol: Any) -> Any:
    """Return how to pickle a module of a swapped class: a tuple (the function `_blank`, its arguments, the module's
    state). `protocol`: number of pickle's protocol.
    """
    own = type(module).own
    return _blank, (type(module).swapped_kind, own), *own.__reduce_ex__(module, protocol)[2:]


def _blank(kind: type[Swapped], own: type) -> Any:
    """Return a module without state of the subclass of `own` with the attributes of `kind`, for unpickling."""
    joined: Any = _joined(kind, own)
    return joined.__new__(joined)
