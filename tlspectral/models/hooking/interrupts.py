"""Context managers that change a model and change it back, whatever interrupts them.

Ctrl-C raises KeyboardInterrupt between any two steps of Python code, also after a change was made and before the `with`
statement that would undo it has begun, and at the first step of `__exit__`. So SIGINT is held back while such a context
is entered or left, and acts as soon as that is done. What is left over all the same (another exception was raised into
a thread from outside) is undone by the next of these contexts; one that is never left, when it is collected.
"""

import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from functools import partial, wraps
from itertools import count
from threading import current_thread, get_ident, main_thread
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from tlspectral.errors import UserBlock

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")


def uninterrupted(
    function: Callable[_Arguments, Iterator[_Value]],
) -> Callable[_Arguments, AbstractContextManager[_Value]]:
    """Make a context manager of a generator function, as `contextlib.contextmanager` does, with SIGINT held back.

    It is held back while the context is entered and left, in the main thread, where Python handles signals; a part of
    the entry that takes long goes into `interruptible`. Inside the context SIGINT acts as without it.
    """
    return _entered_later(function, _Uninterrupted)


def uninterrupted_context(
    unentered: str,
) -> Callable[[Callable[_Arguments, Iterator[_Value]]], Callable[_Arguments, AbstractContextManager[_Value]]]:
    """Do as `uninterrupted` for a context of the user; `unentered` is the warning where it is never entered."""
    return partial(_entered_later, context=partial(_OfUser, unentered))


def _entered_later(
    function: Callable[_Arguments, Iterator[_Value]], context: Callable[..., AbstractContextManager[_Value]]
) -> Callable[_Arguments, AbstractContextManager[_Value]]:
    made = contextmanager(function)

    @wraps(function)
    def entered_later(*given: _Arguments.args, **named: _Arguments.kwargs) -> AbstractContextManager[_Value]:
        return context(partial(made, *given, **named))

    return entered_later


class _Sigint:
    """A handler of SIGINT that stands while contexts are open, and hands signals on to the handler before it.

    Signals are held back while a context is entered or left, which is wherever `holding` is set, or the code that is
    interrupted is of this module or called by it to put the handler there.
    """

    def __init__(self, before: Callable[..., Any]):
        self.before = before
        self.contexts: list[weakref.ref[Any]] = []
        self.holding = False
        self.pending = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        interrupted = frame
        while interrupted is not None and (
            interrupted.f_code is _HANDLER or interrupted.f_globals.get("__name__") in _CALLED_HERE
        ):
            interrupted = interrupted.f_back
        if self.holding or (interrupted is not None and interrupted.f_globals is globals()):
            self.pending = True
        else:
            self.before(number, frame)

    def hand_on(self) -> None:
        self.pending = False
        self.before(signal.SIGINT, sys._getframe())

    def leave(self, left: Any, holding: bool) -> None:
        try:
            self.contexts = [context for context in self.contexts if context() not in (None, left)]
            if not self.contexts and signal.getsignal(signal.SIGINT) is self and current_thread() is main_thread():
                signal.signal(signal.SIGINT, self.before)
        finally:
            self.holding = holding


_HANDLER = _Sigint.__call__.__code__
_CALLED_HERE = ("signal", "enum", "threading")


def _standing_handler() -> _Sigint:
    """Return the handler that stands, in the main thread; put one there if Python code handles SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or current_thread() is not main_thread():
        return _Sigint(lambda *_: None)
    if not isinstance(before, _Sigint):
        before = _Sigint(before)
        signal.signal(signal.SIGINT, before)
    return before


class _Uninterrupted(ContextDecorator):
    entered = False

    # In __enter__ and __exit__ a signal is held back at each step. It is handed on in their last loop, behind which
    # nothing is called, so that Python handles no further signal before they have returned.

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self._make, self._context = make, make()

    def _recreate_cm(self) -> "_Uninterrupted":
        return _Uninterrupted(self._make)

    def __enter__(self):
        self.entered = True  # which a context of the user is asked for when it is dropped
        handler = self._handler = _standing_handler()
        holding, handler.holding = handler.holding, True
        handler.contexts.append(weakref.ref(self))
        entered = False
        try:
            _undo_left_overs()
            value = self._context.__enter__()
            handler.holding, entered = holding, True
            while handler.pending and not holding:
                handler.hand_on()
        except BaseException as error:
            if entered:
                self.__exit__(type(error), error, error.__traceback__)
                raise
            handler.leave(self, holding)
            while handler.pending and not holding:
                handler.hand_on()
            raise
        return value

    def __exit__(self, *raised: Any):
        handler = self._handler
        holding, handler.holding = handler.holding, True
        try:
            suppressed = self._context.__exit__(*raised)
        finally:
            handler.leave(self, holding)
            while handler.pending and not holding:
                handler.hand_on()
        return suppressed


class _OfUser(_Uninterrupted, UserBlock):
    """A context of the user. Its `repr` is what it was asked for, its last argument."""

    def __init__(self, unentered: str, make: Callable[[], AbstractContextManager[Any]]):
        super().__init__(make)
        self.unentered = unentered

    def __repr__(self) -> str:
        given = getattr(self._make, "args", ())
        return repr(given[-1]) if given else super().__repr__()

    def _recreate_cm(self) -> "_OfUser":
        assert self.unentered is not None
        return _OfUser(self.unentered, self._make)


class interruptible:
    """Let SIGINT act in a part of the entry of a context of `uninterrupted`, also one that has come before."""

    def __enter__(self) -> None:
        self._handler = handler = _standing_handler()
        self._holding, handler.holding = handler.holding, False
        try:
            while handler.pending:
                handler.hand_on()
        except BaseException:
            handler.holding = self._holding
            raise

    def __exit__(self, *raised: Any) -> None:
        self._handler.holding = self._holding


class undoing:
    """Call `undo` at the end of a context, and again in the entry of another context if that was broken off.

    `undo` changes back what its own context has changed, whatever others have changed since, and may be called twice.
    """

    def __init__(self, undo: Callable[..., None], *given: Any):
        self._undo = partial(undo, *given)
        self.leaving = False

    def __enter__(self) -> None:
        self._key = next(_keys)
        _open[self._key] = (weakref.ref(self), self._undo, get_ident())

    def __exit__(self, *raised: Any) -> None:
        self.leaving = True
        self._undo()
        _open.pop(self._key, None)


_open: dict[int, tuple["weakref.ref[undoing]", Callable[[], None], int]] = {}
_keys = count()


def _undo_left_overs() -> None:
    for key, (reference, undo, thread) in reversed([*_open.items()]):
        context = reference()
        if context is None or (context.leaving and thread == get_ident()):
            undo()
            _open.pop(key, None)
