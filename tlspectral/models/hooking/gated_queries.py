"""Hook points that hand on queries and their gate together: hooks of the library see the queries alone."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


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
