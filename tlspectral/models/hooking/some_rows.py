"""Hooks of a run whose batch holds rows of several replays: each sees and edits the rows of its own replays."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tlspectral.errors import EditNotHonored


class OfRows:
    """A hook that sees and edits some rows of a batch.

    What has no row of its own for each row of the batch, such as cos and sin, it sees whole and does not edit.
    """

    def __init__(self, hook: Callable[..., Any], rows: slice, batch: int):
        self.hook, self.rows, self.batch = hook, rows, batch

    def __call__(self, activation: Tensor, hook: Any) -> Tensor | None:
        """Run the hook on its rows."""
        # Numbers with two axes are tables by position: ids of tokens alone have a row of the batch in front of them.
        by_row = activation.ndim > 2 or not activation.is_floating_point()
        if not by_row or len(activation) != self.batch:
            if self.hook(activation, hook=hook) is not None:
                raise EditNotHonored(
                    f"{hook.name} passes {tuple(activation.shape)}, which is not a row for each of the {self.batch} "
                    "rows of this run, so it cannot be edited in some of them"
                )
            return None
        edited = self.hook(activation[self.rows], hook=hook)
        if edited is None:
            return None
        whole = activation.clone()
        whole[self.rows] = edited
        return whole

    def apart_from(self, other: Any) -> bool:
        """Return whether another hook acts on other rows alone."""
        own = self.rows
        return isinstance(other, OfRows) and (other.rows.stop <= own.start or own.stop <= other.rows.start)
