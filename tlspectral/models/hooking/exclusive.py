"""Let one thread at a time run a model, in evaluation mode.

Hook points belong to the model, not to a thread: a hook that one thread adds acts in the passes of all threads.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from threading import Condition, Lock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch

from tlspectral.errors import EditNotHonored
from tlspectral.models.hooking.interrupts import interruptible, undoing, uninterrupted


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
ADVICE = "give each thread a copy of the model (copy.deepcopy, outside of any context), or run all of it in one thread"


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
                        f"act in every thread that runs it; {ADVICE}"
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


def model_name(model: Any) -> str:
    """Return the name of a model for messages."""
    return str(getattr(model.cfg, "model_name", None) or type(model).__name__)
