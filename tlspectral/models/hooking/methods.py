"""Replace methods of an object for a while."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tlspectral.models.hooking.interrupts import undoing, uninterrupted


@dataclass(frozen=True, eq=False)
class _Replacement:
    """Methods that one context set on an object.

    methods: from name to the new method.
    before: from name to the object's own attribute before, or `_ABSENT`.
    """

    methods: Mapping[str, Callable[..., Any]]
    before: dict[str, Any]


_replacements: WeakKeyDictionary[Any, list[_Replacement]] = WeakKeyDictionary()
_ABSENT = object()


@uninterrupted
def methods_replaced(owner: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace methods of the object `owner` until the `with` block ends; then the old ones are back. Several such
    blocks may end in any order.

    methods: from name to the new method.
    """
    # In __dict__: a bridge passes attributes that are set on it to the module it wraps.
    own = owner.__dict__
    replacement = _Replacement(methods, {name: own.get(name, _ABSENT) for name in methods})
    with undoing(_put_back, owner, replacement):
        _replacements.setdefault(owner, []).append(replacement)
        own.update(methods)
        yield


def _put_back(owner: Any, replacement: _Replacement) -> None:
    """Undo one replacement of methods on `owner`; later replacements of the same methods remain in force."""
    own, standing = owner.__dict__, _replacements.get(owner, [])
    if replacement not in standing:
        return
    later = standing[standing.index(replacement) + 1 :]
    for name, method in replacement.methods.items():
        above = next((replaced for replaced in later if name in replaced.methods), None)
        before = replacement.before[name]
        if above is not None:
            above.before[name] = before
        elif own.get(name) is method:
            own.pop(name) if before is _ABSENT else own.update({name: before})
    standing.remove(replacement)
