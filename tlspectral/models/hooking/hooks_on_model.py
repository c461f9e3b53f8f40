"""Hooks and evaluation mode for one thread, and a lock by which one at a time runs a model.

Hook points belong to the model, not to a thread: a hook that one thread adds acts in the passes of all threads. Checks
in hooks wait until a pass ends, so that a GPU is not waited for at every hook.
"""

import copyreg
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Condition, Lock, get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.models.hooking.interrupts import interruptible, undoing, uninterrupted
from tlspectral.tables.job import in_worker

Hook = tuple[str, Callable[..., Any]]


@dataclass
class _Use:
    """Which thread uses a model now, None when it is free, and the contexts of that thread that are open.

    A context of the user says what it does, others hold None. While one of the user is open, other
    threads are refused instead of waiting. `evaluating`: the thread has set the model to evaluation mode.
    """

    changed: Condition = field(default_factory=Condition)
    thread: int | None = None
    open: dict[object, Any] = field(default_factory=dict)
    evaluating: bool = False

    def leave(self, context: object) -> None:
        with self.changed:
            self.open.pop(context, None)
            if not self.open:
                self.thread = None
                self.changed.notify_all()


# Not kept in the models: a lock can be neither copied nor pickled.
_uses: WeakKeyDictionary[Any, _Use] = WeakKeyDictionary()
_uses_lock = Lock()
_PATIENCE = 0.2  # seconds that a thread waits for a model before it looks whether it was interrupted
_levels = count(1_000_000)  # TransformerLens removes hooks by level, and its own count contexts from 1
_ADVICE = "give each thread a copy of the model (copy.deepcopy, outside of any context), or run all of it in one thread"


@uninterrupted
def exclusive(model: Any, *, asked: Any = None) -> Iterator[None]:
    """Let this thread alone run a model; others wait. The same thread may enter again.

    While a context of the user is open (`asked` says by `str` what it does), others are refused by EditNotHonored,
    since code in it may wait for them.
    """
    thread, context = get_ident(), object()
    with _uses_lock:
        use = _uses.setdefault(model, _Use())
    with undoing(use.leave, context):
        with use.changed:
            while use.thread not in (None, thread):
                if any(one is not None for one in use.open.values()):
                    raise EditNotHonored(
                        f"{model_name(model)}: another thread has an `ablate` context open on this model, and hooks "
                        f"act in every thread that runs it; {_ADVICE}"
                    )
                use.changed.wait(_PATIENCE)
                with interruptible():
                    pass
            use.thread = thread
            use.open[context] = asked
        yield


def open_contexts(model: Any = None) -> list[Any]:
    """Return the contexts of the user that this thread has open on a model, or (None) on any, in the order of entry."""
    with _uses_lock:
        uses = [*_uses.values()] if model is None else [_uses[model]] if model in _uses else []
    mine = (use for use in uses if use.thread == get_ident())
    return [asked for use in mine for asked in use.open.values() if asked is not None]


def naming_open_contexts() -> str:
    """Return the end of a message that names the contexts that the user has open; empty where none is."""
    return "".join(f"; {one} is open: close it where that is not meant" for one in open_contexts())


def autocast_of(model: Any) -> list[str]:
    """Return the kinds of device, of a model's own and the CPU, on which `torch.autocast` is on."""
    kinds = dict.fromkeys((next(model.parameters()).device.type, "cpu"))
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]


def refuse_autocast(model: Any) -> None:
    """Refuse passes under `torch.autocast`, which would round what is measured to 16 bits. Raises ValueError."""
    for kind in autocast_of(model):
        raise ValueError(
            f"torch.autocast is on for {kind} ({torch.get_autocast_dtype(kind)}), which would round what is measured "
            f"here: measure outside of it, or inside `with torch.autocast({kind!r}, enabled=False)`. For passes in 16 "
            "bits load the model in that type"
        )


@uninterrupted
def evaluating(model: Any) -> Iterator[None]:
    """Set a model to evaluation mode until the context ends, for this thread alone. Raises as `refuse_autocast`.

    Within such a context another one does nothing, so that many passes in one look at the modules once.
    """
    refuse_autocast(model)
    with exclusive(model):
        use = _uses[model]
        if use.evaluating:
            yield
            return
        training = [module for module in modules_of(model) if module.training]
        with undoing(_end_evaluation, use, training):
            use.evaluating = True
            for module in training:
                module.training = False
            yield


def _end_evaluation(use: _Use, training: Iterable[Any]) -> None:
    use.evaluating = False
    for module in training:
        module.training = True


def modules_of(model: Any) -> list[Any]:
    """Return the modules of a model and of the one that it wraps, each once: a bridge does not hold all of that.

    Embedding dropout is outside of it. `modules()` of both takes three times as long.
    """
    found: dict[int, Any] = {}
    waiting = [model, getattr(model, "original_model", model)]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting.extend(module._modules.values())
    return [*found.values()]


class HookOfThread:
    """A hook that raises in the passes of other threads than the one that made it.

    Sent to a worker of ours it is the hook alone: the model there is a copy. In other copies it raises.
    """

    def __init__(self, model: Any, hook: Callable[..., Any]):
        self.model, self.placed, self.thread = model, hook, get_ident()

    @property
    def hook(self) -> Callable[..., Any]:
        """The hook itself, also where it is shown queries alone."""
        return _unwrapped(self.placed)

    def __call__(self, activation: Any, hook: Any) -> Any:
        """Run the hook, unless the pass is of another thread."""
        if get_ident() != self.thread:
            raise EditNotHonored(
                f"{model_name(self.model)}: this pass met a hook of another thread at {hook.name}, which would act in "
                f"it; {_ADVICE}"
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
    return placed.hook if isinstance(placed, OfQueries) else placed


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


def model_name(model: Any) -> str:
    """Return the name of a model for messages."""
    return str(getattr(model.cfg, "model_name", None) or type(model).__name__)


class GatedQueries(str):
    """Name of a point that hands on each head's queries, then its gate (Qwen3-Next); our hooks see queries alone."""

    d_head: int


class OfQueries:
    """A hook that sees and edits the queries of such a point."""

    def __init__(self, hook: Callable[..., Any], d_head: int):
        self.hook, self.d_head = hook, d_head

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Run the hook on the queries, [batch, pos, heads, d_head]."""
        whole = activation.reshape(*activation.shape[:2], -1, 2, self.d_head)
        edited = self.hook(whole[:, :, :, 0], hook=hook)
        if edited is None:
            return None
        both = whole.clone()
        both[:, :, :, 0] = edited
        return both.reshape(activation.shape)


def seen_at(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook for a point of `hook_names` as the model is to run it."""
    if isinstance(name, GatedQueries) and not isinstance(hook, OfQueries):
        return OfQueries(hook, name.d_head)
    return hook


# --- checks in the hooks of a pass, which wait until it ends ---


class _Check(NamedTuple):
    """Numbers of a pass, and a function that is given them on the CPU and may raise."""

    numbers: tuple[Tensor, ...]
    judge: Callable[..., object]


_waiting: dict[int, list[_Check]] = {}  # by thread


@uninterrupted
def checked_at_end() -> Iterator[None]:
    """Make the checks of a pass wait until the context ends: nothing of the pass may be handed on inside it.

    An error of the pass is raised behind the errors of its checks, as what a check refuses can be why the pass failed.
    """
    thread = get_ident()
    checks: list[_Check] = []
    with undoing(_wait_as_before, thread, _waiting.get(thread)):
        _waiting[thread] = checks
        try:
            yield
        except Exception:
            _judge(checks)
            raise
    _judge(checks)


def judged(numbers: tuple[Tensor, ...], judge: Callable[..., object]) -> None:
    """Give numbers to `judge`, on the CPU: at the end of a pass of `checked_at_end`, else now."""
    check = _Check(tuple(one.detach() for one in numbers), judge)
    waiting = _waiting.get(get_ident())
    if waiting is None:
        _judge([check])
    else:
        waiting.append(check)


def _wait_as_before(thread: int, before: list[_Check] | None) -> None:
    if before is None:
        _waiting.pop(thread, None)
    else:
        _waiting[thread] = before


def _judge(checks: list[_Check]) -> None:
    """Run checks in their order; the numbers of one device and type are copied at once."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for check in checks:
        for one in check.numbers:
            kinds.setdefault((one.device, one.dtype), []).append(one)
    copied: dict[int, Tensor] = {}
    for numbers in kinds.values():
        flat = torch.cat([one.flatten() for one in numbers]).cpu()
        for one, part in zip(numbers, flat.split([one.numel() for one in numbers]), strict=True):
            copied[id(one)] = part.view(one.shape)
    for check in checks:
        check.judge(*(copied[id(one)] for one in check.numbers))
