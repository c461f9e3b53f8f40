"""Hooks for a batch that holds rows of several replays: each hook sees and edits only the rows of its own replays."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tlspectral.errors import EditNotHonored


class OfRows:
    """A hook that sees and edits only some rows of a batch. Hooks get (activation, hook point) and may return an edit.

    hook: the function. rows: slice of its rows. batch: rows of the whole batch.

    A tensor without one row per batch row, such as cos and sin, is shown whole and cannot be edited.
    """

    def __init__(self, hook: Callable[..., Any], rows: slice, batch: int):
        self.hook, self.rows, self.batch = hook, rows, batch

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Call the hook on its rows of `activation`; return a copy of the whole activation with its edit, or None if it
        returned None.

        hook: the hook point. Raises EditNotHonored for an edit of a tensor that has not one row per batch row.
        """
        # A float tensor with two axes is a table by position. Integers with two axes are token ids, one row per prompt.
        by_row = activation.ndim > 2 or not activation.is_floating_point()
        if not by_row or len(activation) != self.batch:
            if self.hook(activation, hook=hook) is not None:
                raise EditNotHonored(
                    f"{hook.name} passes {tuple(activation.shape)}, which is not a row for each of the {self.batch} "
                    "rows of this run, so it cannot be edited for some rows: do not return an edit at this hook point"
                )
            return None
        edited = self.hook(activation[self.rows], hook=hook)
        if edited is None:
            return None
        whole = activation.clone()
        whole[self.rows] = edited
        return whole

    def apart_from(self, other: Any) -> bool:
        """Return True if `other`, a hook or any object, is an `OfRows` whose rows do not overlap with this one's."""
        own = self.rows
        return isinstance(other, OfRows) and (other.rows.stop <= own.start or own.stop <= other.rows.start)
