"""Context managers that change a model and change it back, even if they are interrupted.

Ctrl-C raises KeyboardInterrupt between any two steps of Python code. That can be after a change and before the `with`
block that would undo it has begun, or at the first step of `__exit__`. So SIGINT is held back while such a context is
entered or left, and acts right afterwards. Other exceptions (raised into a thread from outside) can still leave a
change behind. The next of these contexts undoes it; a context that is never left is undone when it is
garbage-collected.
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
    """Turn a generator function into a context manager, as `contextlib.contextmanager` does, and hold back SIGINT.

    SIGINT is held back while the context is entered and left, in the main thread, which handles signals in Python.
    Inside the context it acts as usual. Put slow steps of the entry into `interruptible`.
    """
    return _entered_later(function, _Uninterrupted)


def uninterrupted_context(
    unentered: str,
) -> Callable[[Callable[_Arguments, Iterator[_Value]]], Callable[_Arguments, AbstractContextManager[_Value]]]:
    """Return a decorator that makes of a generator function a context manager that holds back SIGINT, for users.

    SIGINT (Ctrl-C) is held back while the context is entered or left, and acts right afterwards.

    unentered: warning that is given if the context is created but never entered.
    """
    return partial(_entered_later, context=partial(_OfUser, unentered))


def _entered_later(
    function: Callable[_Arguments, Iterator[_Value]], context: Callable[..., AbstractContextManager[_Value]]
) -> Callable[_Arguments, AbstractContextManager[_Value]]:
    """Return a function that creates the context manager of a generator function, without entering it.

    function: the generator function, with one `yield`. context: class that wraps it, such as `_Uninterrupted`.
    """
    made = contextmanager(function)

    @wraps(function)
    def entered_later(*given: _Arguments.args, **named: _Arguments.kwargs) -> AbstractContextManager[_Value]:
        return context(partial(made, *given, **named))

    return entered_later


class _Sigint:
    """A SIGINT handler that is installed while contexts are open; it passes signals on to the handler `before`.

    Signals are held back while a context is entered or left. A signal is held back while `holding` is set, or if the
    interrupted code belongs to this module or was called by it to install the handler.
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
        """Pass the signal that was held back on to the previous handler."""
        self.pending = False
        self.before(signal.SIGINT, sys._getframe())

    def leave(self, left: Any, holding: bool) -> None:
        """Forget a context that was left; remove this handler if no context is open.

        left: the context. holding: the new value of `holding`.
        """
        try:
            self.contexts = [context for context in self.contexts if context() not in (None, left)]
            if not self.contexts and signal.getsignal(signal.SIGINT) is self and current_thread() is main_thread():
                signal.signal(signal.SIGINT, self.before)
        finally:
            self.holding = holding


_HANDLER = _Sigint.__call__.__code__
_CALLED_HERE = ("signal", "enum", "threading")


def _standing_handler() -> _Sigint:
    """Return the installed `_Sigint` handler; in the main thread it is installed if Python code handles SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or current_thread() is not main_thread():
        return _Sigint(lambda *_: None)
    if not isinstance(before, _Sigint):
        before = _Sigint(before)
        signal.signal(signal.SIGINT, before)
    return before


class _Uninterrupted(ContextDecorator):
    """A context manager whose entry and exit hold back SIGINT (Ctrl-C), which acts right afterwards.

    make: function that returns the context manager to enter and leave.
    """

    entered = False

    # In __enter__ and __exit__ a signal is held back at each step. It is passed on in their last loop. Nothing is
    # called after that loop, so Python handles no further signal before they have returned.

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]):
        self._make, self._context = make, make()

    def _recreate_cm(self) -> "_Uninterrupted":
        return _Uninterrupted(self._make)

    def __enter__(self):
        self.entered = True  # a user's context that is dropped with False gives a warning
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
    """A context manager that a user opens; its entry and exit hold back SIGINT (Ctrl-C), which acts right afterwards.

    unentered: warning that is given if it is never entered. make: function that returns the context manager to enter
    and leave. Its `repr` is the description of the block, the last argument it was made with.
    """

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
    """A context manager that lets Ctrl-C act during a slow step of an `uninterrupted` entry.

    A signal that was held back before acts at once. At the end of the `with` block signals are held back again.
    """

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
    """Call `undo(*given)` when a `with` block ends; if that is interrupted, again when the next context is entered.

    `undo` has to revert only its own change, whatever other contexts changed since, and may be called twice.
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
    """Undo the changes of `undoing` blocks whose exit was interrupted or that were garbage-collected without one."""
    for key, (reference, undo, thread) in reversed([*_open.items()]):
        context = reference()
        if context is None or (context.leaving and thread == get_ident()):
            undo()
            _open.pop(key, None)
