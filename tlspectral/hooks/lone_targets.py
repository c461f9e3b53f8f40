"""Edges to one query head alone, though its group shares keys and values: a counterfactual.

The other heads of the group keep reading the key or value as it is, which no change of the residual stream could do. So
keys are edited where they meet the query, in the scores, and values where they are summed, in z.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.hooks.capture import HeadCapture, acts_first, key_weights
from tlspectral.hooks.edges import EdgeTarget
from tlspectral.hooks.parts import Rotation
from tlspectral.hooks.probe import require_honoured
from tlspectral.models.attention.threads import Hook
from tlspectral.models.attention.writes import INPUT_POINTS
from tlspectral.rotary import widened

Change = Tensor | None


@dataclass
class LoneTarget(EdgeTarget):
    """The hooks that take what the sources wrote out of the keys or values that the target heads alone read.

    Each target sees the group's key or value without it, a query/key norm taken again; all other heads see the old one.
    """

    def hooks(self) -> list[Hook]:
        """Return a `fwd_hooks` list whose edits are proved to reach the output, else raise EditNotHonored."""
        names, layer = self.names, self.layer.layer
        own = (names[INPUT_POINTS[self.what]], self._hold_own)
        held = [(names["residual"], self.hold_stream), own]
        if "scores" in names and self.what == "k":
            self.prove_scores()
            return [*held, *self.holders("query", "cos", "sin"), (names["scores"], self._edit_scores)]
        require_honoured(self.view, layer, "z")
        if "scores" in names:
            return [*held, *self.holders("pattern"), (names["z"], self._edit_z)]
        others = self.holders("query", "value" if self.what == "k" else "key")
        return [*held, *others, (names["z"], self._edit_delegated_z)]

    def _hold_own(self, captured: Tensor, hook: Any) -> None:
        self.hold(INPUT_POINTS[self.what], captured)
        if acts_first(hook, self._hold_own):
            x = self.taken("residual")
            self.require_own_reads(captured, widened(x).to(captured.device))
            self.hold("residual", x)

    def _edit_scores(self, scores: Float[Tensor, "batch heads query key"], hook: Any) -> Tensor:
        q, k = self.taken("query"), self.taken("key")
        rotation = self.rotation(q.shape[1])
        projections = self.projected(q, k)
        self.require_lengths(*scores.shape[-2:], q.shape[1], k.shape[1])
        if acts_first(hook, self._edit_scores):
            self.require_own_scores(scores, *projections, rotation)
        selected = self.selected(scores, heads_axis=1)
        pairs = [self._scores_of(index, q, keys, rotation) for index, keys in enumerate(self._changed_keys(k))]
        change = torch.stack([after - before for before, after in pairs], dim=1)
        edited = selected + change.to(selected).masked_fill(~self.visible(selected), 0.0)
        return self.with_replaced(scores, edited, heads_axis=1)

    def _edit_z(self, z: Float[Tensor, "batch pos heads d_head"], hook: Any) -> Tensor:
        value, pattern = self.taken("value"), widened(self.taken("pattern"))
        weights = self.selected(pattern, heads_axis=1)
        return self._with_values(z, value, weights, first=acts_first(hook, self._edit_z), delegated=False)

    def _edit_delegated_z(self, z: Float[Tensor, "batch pos heads d_head"], hook: Any) -> Tensor:
        q, k, value = (self.taken(point) for point in ("query", "key", "value"))
        self.require_lengths(q.shape[1], k.shape[1], value.shape[1], z.shape[1])
        rotation = self.rotation(q.shape[1])
        if self.what == "v":
            scores = self.capped(self.raw_scores(*self.projected(q, k), rotation))
            weights = key_weights(scores, self.causal_mask(scores))
            return self._with_values(z, value, weights, first=acts_first(hook, self._edit_delegated_z), delegated=True)
        mixed: list[list[Tensor]] = []
        for index, keys in enumerate(self._changed_keys(k)):
            pair = self._scores_of(index, q, keys, rotation)
            values = self.values(value, pair[0])[:, index]
            mixed.append([key_weights(scores, self.causal_mask(scores)) @ values for scores in pair])
        before, after = (torch.stack(each, dim=2) for each in zip(*mixed, strict=True))
        selected = self.selected(z, heads_axis=2)
        self.require_own_z(selected, before, delegated=True)
        return self.with_replaced(z, selected + (after - before).to(z), heads_axis=2)

    def _with_values(self, z: Tensor, value: Tensor, weights: Tensor, *, first: bool, delegated: bool) -> Tensor:
        """Return z with the changed values of the targets, weighed as the model weighs the old ones."""
        selected = self.selected(z, heads_axis=2)
        if first:  # else an earlier block may have edited z
            rebuilt = (weights @ self.values(value, weights)).transpose(1, 2)
            self.require_own_z(selected, rebuilt, delegated=delegated)
        change = torch.stack([after for _, after in self._changes(value)], dim=1)
        return self.with_replaced(z, selected + (weights @ change.to(weights)).transpose(1, 2).to(z), heads_axis=2)

    def _changes(self, captured: Tensor) -> list[tuple[Change, Tensor]]:
        """Return for each target what earlier blocks, and then this one, change of the key or value that it reads."""
        x, removed = self.stream(captured)
        asked = ((self.layer.kv_head(head), head) for head in self.heads)
        changes = self.changes(x, removed, asked)
        self.note(removed, alone=True)
        return changes

    def _changed_keys(self, k: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each target the keys of the layer before and after the change of its own group's key."""
        pairs = []
        for head, (earlier, change) in zip(self.heads, self._changes(k), strict=True):
            before = self._with_change(k, head, earlier)
            pairs.append((before, self._with_change(before, head, change)))
        return pairs

    def _with_change(self, k: Tensor, head: int, change: Change) -> Tensor:
        changed = widened(k).clone()
        if change is not None:
            columns = torch.tensor(self.columns(self.layer.kv_head(head), k), device=k.device)
            changed[:, :, columns] += change[:, :, None].to(changed)
        return changed

    def _scores_of(
        self, index: int, q: Tensor, keys: tuple[Tensor, Tensor], rotation: Rotation | None
    ) -> tuple[Tensor, Tensor]:
        """Return the capped scores of one target against keys before and after the change, [batch, pos, pos] each."""
        one = HeadCapture(self.view, self.layer, [self.heads[index]])
        own_rotation = None if rotation is None else rotation.of_heads([index])
        before, after = (one.capped(one.raw_scores(*one.projected(q, k), own_rotation))[:, 0] for k in keys)
        return before, after
