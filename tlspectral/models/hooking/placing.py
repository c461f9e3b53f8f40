"""Place hooks on a model for one thread, and take hooks off for a while."""

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
from tlspectral.models.hooking.strips import OfStrips
from tlspectral.tables.job import in_worker

Hook = tuple[str, Callable[..., Any]]
_levels = count(1_000_000)  # TransformerLens removes hooks by level, and its own count contexts from 1


class HookOfThread:
    """A hook that raises EditNotHonored in passes of every thread except the thread that placed it.

    model: the model it is on. hook: function of (activation, hook point). Pickled into one of our worker processes it
    acts there, because the model there is a copy. In other copies it raises.
    """

    def __init__(self, model: Any, hook: Callable[..., Any]):
        self.model, self.placed, self.thread = model, hook, get_ident()

    @property
    def hook(self) -> Callable[..., Any]:
        """The function of the user or library that this hook calls, without wrappers for queries or rows."""
        return _unwrapped(self.placed)

    def __call__(self, activation: Any, hook: Any) -> Any:
        """Call the hook on (`activation`, hook point `hook`) and return its result: an edited activation or None.

        Raises EditNotHonored in a pass of another thread.
        """
        if get_ident() != self.thread:
            raise EditNotHonored(
                f"{model_name(self.model)}: in this pass a hook of another thread would act at {hook.name}; {ADVICE}"
            )
        return self.placed(activation, hook=hook)

    def __deepcopy__(self, memo: Any) -> "HookOfThread":
        return self

    def __reduce__(self) -> Any:
        return _HookOfCopy, (model_name(self.model), self.placed)


class _HookOfCopy:
    """A hook of a model that was pickled while a context was open. It acts only in our worker processes.

    model: name of the model. placed: function of (activation, hook point). In any other process it raises
    EditNotHonored.
    """

    def __init__(self, model: str, placed: Callable[..., Any]):
        self.model, self.placed = model, placed

    @property
    def hook(self) -> Callable[..., Any]:
        """The function of the user or library that was placed, without wrappers for queries or rows."""
        return _unwrapped(self.placed)

    def __call__(self, activation: Any, hook: Any) -> Any:
        if not in_worker():
            refuse_copy(self.model)
        return self.placed(activation, hook=hook)


class _AtPoint:
    """The function that PyTorch calls at a hook point for one of our hooks. In a deep copy of the model it raises.

    model: the model with the hook point. call: TransformerLens' function that calls the hook.
    """

    def __init__(self, model: Any, call: Callable[..., Any]):
        self.model, self.call = model, call

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    def __deepcopy__(self, memo: Any) -> Callable[..., Any]:
        return partial(refuse_copy, model_name(self.model))

    def __reduce__(self) -> Any:
        return _same, (self.call,)


def refuse_copy(model: str, *given: Any, **named: Any) -> Any:
    """Raise EditNotHonored: this model is a copy that was made inside an `ablate` block, with its hooks.

    model: name of the model. given, named: ignored arguments of a hook.
    """
    raise EditNotHonored(
        f"{model}: this model was copied inside an `ablate` context and carries its hooks: copy the model before "
        "opening the context"
    )


@uninterrupted
def hooks_on(
    model: Any, points: Mapping[str, Any], hooks: Iterable[Hook], *, ahead: Collection[str] = ()
) -> Iterator[None]:
    """Place hooks on a model until the `with` block ends, for this thread only.

    It differs from `model.hooks(fwd_hooks=hooks)` in two ways. It raises if another thread runs the model or if a hook
    is removed early. It is faster, because a bridge builds its dictionary of hook points again for every hook, which
    for 30 layers takes as long as a layer of the model.

    points: `model.hook_dict`. hooks: pairs of hook point name and function. ahead: names of points at which the hooks
    act before hooks that are already there; elsewhere they act after them.

    Raises:
        EditNotHonored: another thread has an `ablate` block open; or another thread's pass met one of the hooks (raised
            in that pass); or a hook was removed before the end (not raised over another exception).
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
            f"the `with` block (the first at {lost[0]}), so later runs in it were without them: do not call "
            "reset_hooks inside the block (run_with_hooks, run_with_cache and `with model.hooks(...)` are safe)"
        )


def holding(held: dict[str, Any], names: Iterable[str]) -> list[Hook]:
    """Return hooks, as pairs of hook point name and function, that store the last activation at each named point.

    held: dict that they fill, from name to activation. names: the hook points.
    """
    return [(name, partial(_hold, held, name)) for name in names]


def _hold(held: dict[str, Any], name: str, activation: Any, hook: Any) -> None:
    """Store an activation in `held` under `name`, without gradients. hook: the hook point, not used."""
    held[name] = activation.detach()


@uninterrupted
def without_hooks(model: Any, points: Mapping[str, Any]) -> Iterator[None]:
    """Take all hooks off a model, and turn autocast off, until the `with` block ends; then put the hooks back in their
    order.

    points: `model.hook_dict`, from name to hook point.
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
    """Put hooks back on their hook points, except hooks that their owners removed meanwhile.

    registered: for each hook point its hooks and the ids that TransformerLens knew.
    """
    for point, hooks, known in registered:
        removed = known - _known_ids(point)  # removed by their owners while the context was open
        point._forward_hooks.update({key: hook for key, hook in hooks.items() if key not in removed})


def _known_ids(point: Any) -> set[int]:
    """Return the ids of the hooks that TransformerLens lists at the hook point `point`."""
    return {handle.hook.id for handle in point.fwd_hooks}


def _take_off(placed: list[tuple[str, Any, Any]]) -> None:
    """Remove hooks that `hooks_on` placed from their hook points. placed: (name, hook point, handle) of each."""
    for _, point, handle in placed:
        handle.hook.remove()
        point.fwd_hooks = [other for other in point.fwd_hooks if other is not handle]


def _unwrapped(placed: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of the user or library in `placed`, without its wrappers for queries, rows or strips."""
    while isinstance(placed, OfQueries | OfRows | OfStrips):
        placed = placed.hook
    return placed


def acts_first(point: Any, edit: Callable[..., Any]) -> bool:
    """Return True if the hook `edit` is on a hook point and acts before all other hooks on the same rows.

    point: the hook point (a module). edit: the function that was placed.
    """
    placed = [handle.user_hook for handle in getattr(point, "fwd_hooks", ())]
    place = next((index for index, other in enumerate(placed) if _holds(other, edit)), None)
    if place is None:
        return False
    rows = _rows_of(placed[place])
    return all(rows is not None and rows.apart_from(_rows_of(other)) for other in placed[:place])


def _holds(placed: Any, edit: Callable[..., Any]) -> bool:
    """Return True if `placed` is the hook `edit`, or a wrapper around it, such as `OfRows` around `OfStrips`."""
    while placed != edit and hasattr(placed, "hook"):
        placed = placed.hook
    return placed == edit


def _rows_of(placed: Any) -> OfRows | None:
    """Return the `OfRows` wrapper (a hook that acts on some rows of the batch only) in a placed hook; None for a hook
    on all rows.
    """
    placed = getattr(placed, "placed", placed)
    placed = placed.hook if isinstance(placed, OfQueries) else placed
    return placed if isinstance(placed, OfRows) else None


def _same(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the hook unchanged (used by pickle)."""
    return hook


def send_captures_by_name() -> None:
    """Register with `copyreg` that pickle refers to transformers' collector of outputs by its name; nothing to do if it
    is not imported.

    After `run_with_cache` hooks on the model refer to this collector, whose context variable cannot be pickled.
    """
    capturing: Any = sys.modules.get("transformers.utils.output_capturing")
    if hasattr(capturing, "CompileableContextVar"):

        def named(collector: Any) -> str:
            return next(name for name, value in vars(capturing).items() if value is collector)

        copyreg.pickle(capturing.CompileableContextVar, named)
