"""Put hooks on a model for one thread, and take hooks off for a while."""

import copyreg
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import count
from threading import get_ident
from typing import Any

import torch

from tlspectral.errors import EditNotHonored
from tlspectral.models.hooking.exclusive import ADVICE, autocast_of, exclusive, model_name
from tlspectral.models.hooking.gated_queries import OfQueries, seen_at
from tlspectral.models.hooking.interrupts import undoing, uninterrupted
from tlspectral.models.hooking.some_rows import OfRows
from tlspectral.tables.job import in_worker

Hook = tuple[str, Callable[..., Any]]
_levels = count(1_000_000)  # TransformerLens removes hooks by level, and its own count contexts from 1


class HookOfThread:
    """A hook that raises in the passes of other threads than the one that made it.

    Sent to a worker of ours it is the hook alone: the model there is a copy. In other copies it raises.
    """

    def __init__(self, model: Any, hook: Callable[..., Any]):
        self.model, self.placed, self.thread = model, hook, get_ident()

    @property
    def hook(self) -> Callable[..., Any]:
        """The hook itself, also where it is shown queries or some rows alone."""
        return _unwrapped(self.placed)

    def __call__(self, activation: Any, hook: Any) -> Any:
        """Run the hook, unless the pass is of another thread."""
        if get_ident() != self.thread:
            raise EditNotHonored(
                f"{model_name(self.model)}: this pass met a hook of another thread at {hook.name}, which would act in "
                f"it; {ADVICE}"
            )
        return self.placed(activation, hook=hook)

    def __deepcopy__(self, memo: Any) -> "HookOfThread":
        return self

    def __reduce__(self) -> Any:
        return _HookOfCopy, (model_name(self.model), self.placed)


class _HookOfCopy:
    """A hook of a model that was sent to another process while a context was open: it acts in workers of ours alone."""

    def __init__(self, model: str, placed: Callable[..., Any]):
        self.model, self.placed = model, placed

    @property
    def hook(self) -> Callable[..., Any]:
        return _unwrapped(self.placed)

    def __call__(self, activation: Any, hook: Any) -> Any:
        if not in_worker():
            refuse_copy(self.model)
        return self.placed(activation, hook=hook)


class _AtPoint:
    """What PyTorch calls at a hook point for a hook of ours. In a deep copy of the model it raises."""

    def __init__(self, model: Any, call: Callable[..., Any]):
        self.model, self.call = model, call

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return partial(refuse_copy, model_name(self.model))

    def __reduce__(self) -> Any:
        return _same, (self.call,)


def refuse_copy(model: str, *given: Any, **named: Any) -> Any:
    """Refuse a run of a copy that was made while hooks of a context were on the model. Raises EditNotHonored."""
    raise EditNotHonored(
        f"{model}: this model was copied inside an `ablate` context, whose hooks are on the copy: copy the model "
        "before the context"
    )


@uninterrupted
def hooks_on(
    model: Any, points: Mapping[str, Any], hooks: Iterable[Hook], *, ahead: Collection[str] = ()
) -> Iterator[None]:
    """Put hooks on a model until the context ends, for this thread alone.

    It differs from `model.hooks(fwd_hooks=hooks)` in that passes of other threads and hooks that are removed early
    raise. It is also faster: a bridge builds its dictionary of hook points anew for every hook it is given, which for
    30 layers costs as much as a block of the model. `points` is `model.hook_dict`, taken once for many short runs. At
    the points named in `ahead` they act before the hooks that are there, elsewhere after them.

    Raises:
        EditNotHonored: another thread has an `ablate` context open; a pass of another thread met one of the hooks
            (raised there); or a hook was taken off before the end (not raised over another exception).
    """
    level = next(_levels)
    placed: list[tuple[str, Any, Any]] = []
    with exclusive(model), undoing(_take_off, placed):
        for name, hook in hooks:
            point = points[name]
            point.add_hook(HookOfThread(model, seen_at(name, hook)), level=level, prepend=name in ahead)
            handle = point.fwd_hooks[0 if name in ahead else -1]
            placed.append((name, point, handle))
            point._forward_hooks[handle.hook.id] = _AtPoint(model, point._forward_hooks[handle.hook.id])
        yield
        lost = [name for name, point, handle in placed if handle.hook.id not in point._forward_hooks]
    if lost:
        raise EditNotHonored(
            f"{model_name(model)}: {len(lost)} of the {len(placed)} hooks were taken off the model before the end of "
            f"the context (the first at {lost[0]}), so that later runs in it were without them; do not call "
            "reset_hooks inside the context. run_with_hooks and run_with_cache, and `with model.hooks(...)`, take off "
            "their own hooks alone"
        )


def holding(held: dict[str, Any], names: Iterable[str]) -> list[Hook]:
    """Return hooks that hold what passes the named points last, by name."""
    return [(name, partial(_hold, held, name)) for name in names]


def _hold(held: dict[str, Any], name: str, activation: Any, hook: Any) -> None:
    held[name] = activation.detach()


@uninterrupted
def without_hooks(model: Any, points: Mapping[str, Any]) -> Iterator[None]:
    """Take all hooks off the model until the context ends, then restore them in their order; autocast is off in it.

    `points` is `model.hook_dict`.
    """
    with exclusive(model), ExitStack() as plain:
        for kind in autocast_of(model):
            plain.enter_context(torch.autocast(kind, enabled=False))
        distinct = {id(point): point for point in points.values()}.values()
        registered = [
            (point, dict(point._forward_hooks), _known_ids(point)) for point in distinct if point._forward_hooks
        ]
        with undoing(_restore, registered):
            for point, _, _ in registered:
                point._forward_hooks.clear()
            yield


def _restore(registered: Iterable[tuple[Any, dict[int, Any], set[int]]]) -> None:
    for point, hooks, known in registered:
        removed = known - _known_ids(point)  # by those whose hooks they are, while the context was open
        point._forward_hooks.update({key: hook for key, hook in hooks.items() if key not in removed})


def _known_ids(point: Any) -> set[int]:
    return {handle.hook.id for handle in point.fwd_hooks}


def _take_off(placed: list[tuple[str, Any, Any]]) -> None:
    for _, point, handle in placed:
        handle.hook.remove()
        point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]


def _unwrapped(placed: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(placed, OfQueries | OfRows):
        placed = placed.hook
    return placed


def acts_first(point: Any, edit: Callable[..., Any]) -> bool:
    """Return whether a hook acts before all others of its hook point that act on its rows."""
    placed = [handle.user_hook for handle in getattr(point, "fwd_hooks", ())]
    own = next((index for index, one in enumerate(placed) if getattr(one, "hook", one) == edit), None)
    if own is None:
        return False
    rows = _rows_of(placed[own])
    return all(rows is not None and rows.apart_from(_rows_of(one)) for one in placed[:own])


def _rows_of(placed: Any) -> OfRows | None:
    """Return the hook of some rows that a hook on a model is; None for one of all rows."""
    placed = getattr(placed, "placed", placed)
    placed = placed.hook if isinstance(placed, OfQueries) else placed
    return placed if isinstance(placed, OfRows) else None


def _same(hook: Callable[..., Any]) -> Callable[..., Any]:
    return hook


def send_captures_by_name() -> None:
    """Let pickles refer to transformers' collector of outputs by its name.

    After `run_with_cache` hooks on the model refer to the collector, whose context variable cannot be pickled.
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if hasattr(capturing, "CompileableContextVar"):

        def named(collector: Any) -> str:
            return next(name for name, value in vars(capturing).items() if value is collector)

        copyreg.pickle(capturing.CompileableContextVar, named)
