"""Let one thread at a time run a model, in evaluation mode.

Hook points belong to the model and not to a thread, so a hook of one thread acts in the passes of all threads.
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
    """State of a model's use by threads.

    changed: condition that wakes waiting threads.
    thread: id of the thread that uses the model, None if it is free.
    open: open contexts of that thread. The value describes a context of the user; None for internal contexts. While one
    of the user's is open, other threads get an error instead of waiting.
    evaluating: the thread has set the model to evaluation mode.
    """

    changed: Condition = field(default_factory=Condition)
    thread: int | None = None
    open: dict[object, Any] = field(default_factory=dict)
    evaluating: bool = False

    def leave(self, context: object) -> None:
        """Remove an open context by its key `context`; if it was the last one, free the model for other threads."""
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
    """Reserve a model for this thread until the `with` block ends; other threads wait. The same thread may enter again.

    asked: description (by `str`) of a block that the user opened; None for internal use. While such a block is open,
    other threads get EditNotHonored instead of waiting, because code in the block may wait for them.
    """
    thread, context = get_ident(), object()
    with _uses_lock:
        use = _uses.setdefault(model, _Use())
    with undoing(use.leave, context):
        with use.changed:
            while use.thread not in (None, thread):
                if any(description is not None for description in use.open.values()):
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
    """Return descriptions (objects with `str`) of the blocks, such as `ablate`, that the user has open in this thread.

    The oldest comes first. model: only blocks on this model; None: on any model.
    """
    with _uses_lock:
        uses = [*_uses.values()] if model is None else [_uses[model]] if model in _uses else []
    mine = (use for use in uses if use.thread == get_ident())
    return [asked for use in mine for asked in use.open.values() if asked is not None]


def naming_open_contexts() -> str:
    """Return the end of an error message that names the user's open blocks; empty if none is open."""
    return "".join(f"; {block} is open: close it if that was not intended" for block in open_contexts())


def autocast_of(model: Any) -> list[str]:
    """Return the device types on which `torch.autocast` is on, such as ["cuda"]: the model's own and the CPU."""
    kinds = dict.fromkeys((next(model.parameters()).device.type, "cpu"))
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]


def refuse_autocast(model: Any) -> None:
    """Raise ValueError if `torch.autocast` is on for the CPU or the device of `model`, because it would round measured
    values to 16 bits.
    """
    for kind in autocast_of(model):
        raise ValueError(
            f"torch.autocast is on for {kind} ({torch.get_autocast_dtype(kind)}) and would round measured values: call "
            f"this outside of it, or inside `with torch.autocast({kind!r}, enabled=False)`. For passes in 16 bits load "
            "the model in that type"
        )


@uninterrupted
def evaluating(model: Any) -> Iterator[None]:
    """Set a model to evaluation mode until the `with` block ends, for this thread only; then each module gets its old
    mode back.

    A nested block does nothing, so many passes in one block go through the modules only once. Raises ValueError if
    `torch.autocast` is on, EditNotHonored if another thread has an `ablate` block open on the model.
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
    """Set modules back to training mode, and note in `use` that the model is no longer in evaluation mode.

    training: the modules that were in training mode before.
    """
    use.evaluating = False
    for module in training:
        module.training = True


def modules_of(model: Any) -> list[Any]:
    """Return all modules of a model and of the model it wraps, each once.

    A bridge does not register every module of the wrapped model (embedding dropout, for example).
    """
    # `modules()` of both models takes three times as long.
    modules: dict[int, Any] = {}
    waiting = [model, getattr(model, "original_model", model)]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            waiting.extend(module._modules.values())
    return [*modules.values()]


def model_name(model: Any) -> str:
    """Return the name of a TransformerLens model for messages: its `cfg.model_name`, otherwise its class."""
    return str(getattr(model.cfg, "model_name", None) or type(model).__name__)
