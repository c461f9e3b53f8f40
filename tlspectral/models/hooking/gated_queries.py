"""Hook points that show queries and their gate together. Hooks of the library see only the queries."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class GatedQueries(str):
    """Name of a hook point that shows each head's queries, then its gate (Qwen3-Next).

    Hooks of the library see only the queries there. `d_head`: columns of a head's queries.
    """

    d_head: int


class OfQueries:
    """A hook that sees and edits only the queries at a `GatedQueries` point, which also shows the gate.

    hook: function of (activation, hook point) that may return an edit. d_head: columns of a head's queries.
    """

    def __init__(self, hook: Callable[..., Any], d_head: int):
        self.hook, self.d_head = hook, d_head

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Call the hook on the queries [batch, pos, heads, d_head] in `activation`, which holds queries and gate.

        hook: the hook point. Return a copy of the whole activation with the hook's edit, or None if the hook returned
        None.
        """
        whole = activation.reshape(*activation.shape[:2], -1, 2, self.d_head)
        edited = self.hook(whole[:, :, :, 0], hook=hook)
        if edited is None:
            return None
        with_gate = whole.clone()
        with_gate[:, :, :, 0] = edited
        return with_gate.reshape(activation.shape)


def seen_at(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function to place at a hook point: the hook itself, or an `OfQueries` at a `GatedQueries` point.

    name: hook point, from `hook_names`.
    """
    if isinstance(name, GatedQueries) and not isinstance(hook, OfQueries):
        return OfQueries(hook, name.d_head)
    return hook
