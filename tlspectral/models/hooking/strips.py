"""Strips: consecutive queries of a prompt whose attention is computed at a time, and hooks that take strips.

In a long prompt the hook points of scores and pattern pass one strip after another, [batch, heads, queries, keys] with
all keys up to the last query of the strip. Elsewhere they pass the whole matrix, which is a strip of all queries.
"""

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tlspectral.models.hooking.gated_queries import OfQueries
from tlspectral.models.hooking.some_rows import OfRows


@dataclass(frozen=True, eq=False)
class Strip:
    """Consecutive queries of a prompt, and the keys that are computed for them.

    Attributes:
        start, stop: the first query, and the query after the last.
        n_queries: number of queries of the whole prompt.
        sample: True for a strip that only shows the shape of a result; hooks are not called for it.
        known: values computed for this strip so far, for values that are used twice.
    """

    start: int
    stop: int
    n_queries: int
    sample: bool = False
    known: dict[int, Any] = field(default_factory=dict, repr=False)

    @property
    def n_keys(self) -> int:
        """Number of keys that the rows of a causal model have: all up to the last query of the strip."""
        return self.stop

    @property
    def queries(self) -> slice:
        """The queries of the strip, as a slice of positions."""
        return slice(self.start, self.stop)

    @property
    def is_whole(self) -> bool:
        """True for a strip of all queries."""
        return self.is_first and self.is_last

    @property
    def is_first(self) -> bool:
        """True for the strip with the first query of the prompt."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """True for the strip with the last query of the prompt."""
        return self.stop == self.n_queries


current: ContextVar[Strip | None] = ContextVar("current", default=None)
"""The strip whose scores or pattern a hook point passes now; None where it passes the whole matrix."""


class OfStrips:
    """A hook that takes strips: it is called with (activation, strip, hook point) and may return an edit.

    hook: the function. `strip` is a `Strip`, of all queries where the hook point passes the whole matrix.
    """

    def __init__(self, hook: Callable[..., Any]):
        self.hook = hook

    def __call__(self, activation: Tensor, hook: Any) -> Any:
        """Call the function with the strip that passes now. hook: the hook point."""
        return self.hook(activation, strip_of(activation), hook)


def strip_of(activation: Tensor) -> Strip:
    """Return the strip that passes a hook point now; without strips, all queries of `activation` [..., query, key]."""
    n_queries = activation.shape[-2]
    return current.get() or Strip(0, n_queries, n_queries)


def strips(n_queries: int, size: int) -> Iterator[Strip]:
    """Yield the strips of `size` queries of a prompt with `n_queries` tokens; the last one can be shorter."""
    for start in range(0, n_queries, size):
        yield Strip(start, min(start + size, n_queries), n_queries)


def takes_strips(placed: Any) -> bool:
    """Return True if a hook on a hook point of scores or pattern is an `OfStrips`, whatever it is wrapped in."""
    placed = getattr(placed, "placed", placed)
    while isinstance(placed, OfQueries | OfRows):
        placed = placed.hook
    return isinstance(placed, OfStrips)
