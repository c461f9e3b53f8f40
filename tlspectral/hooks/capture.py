"""What hooks hold of some heads of one layer during a run: queries, keys, values, and the scores and z they give."""

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.algebra.rotary import per_pair
from tlspectral.errors import EditNotHonored
from tlspectral.hooks.probe import require_honoured
from tlspectral.models.attention.head_scores import HeadScores, Rotation, keys_read
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.hooking.placing import Hook, holding
from tlspectral.models.reading.layer import AttentionLayer, require_even_scale, softcapped
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection import head_name


@dataclass(repr=False)
class HeadCapture:
    """Heads of one layer, and the activations that hooks share within a run.

    Attributes:
        stacked: the batch is len(heads) copies of one batch, one after the other, and the i-th head of `heads` (which
            may recur) stands for the i-th copy alone.
        seen: activations that the hooks of a run have captured so far, by thread.
    """

    view: AttentionView
    layer: AttentionLayer
    heads: list[int]
    stacked: bool = field(default=False, kw_only=True)
    seen: dict[int, dict[str, Tensor]] = field(default_factory=dict, kw_only=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.said})"

    @property
    def said(self) -> str:
        """The heads by name."""
        return ", ".join(head_name(self.layer.layer, head) for head in self.heads)

    @property
    def names(self) -> dict[str, str]:
        """Names of the layer's hook points, by what passes there."""
        return self.view.hook_names(self.layer.layer)

    def holders(self, *points: str) -> list[Hook]:
        """Return hooks that hold what passes these points, where the layer has them."""
        names = self.names
        return [(names[point], partial(self.hold, point)) for point in points if point in names]

    def hold(self, point: str, activation: Tensor, hook: Any = None) -> None:
        """Keep an activation of this run for a later hook."""
        self.seen.setdefault(get_ident(), {})[point] = activation

    def taken(self, point: str) -> Tensor:
        """Return an activation that was held, and forget it. Raises EditNotHonored where it was not seen."""
        seen = self.seen.get(get_ident(), {})
        if point not in seen:
            raise EditNotHonored(
                f"layer {self.layer.layer}: the {point} of this run was not seen: some of the ablation's hooks were "
                "taken off the model and some left; call model.reset_hooks() and put them on again"
            )
        return seen.pop(point)

    def selected(self, whole: Tensor, heads: list[int] | None = None, *, heads_axis: int) -> Tensor:
        """Select the heads of a tensor. In a stacked batch, head i is taken from copy i."""
        heads = self.heads if heads is None else heads
        copy, head = head_indices(tuple(heads), whole.device)
        if not self.stacked:
            return whole.index_select(heads_axis, head)
        return whole.unflatten(0, (len(heads), -1)).movedim(heads_axis + 1, 1)[copy, head].movedim(0, heads_axis)

    def with_replaced(self, whole: Tensor, replacement: Tensor, *, heads_axis: int) -> Tensor:
        """Return a copy of `whole` with the heads replaced."""
        edited, (copy, head) = whole.clone(), head_indices(tuple(self.heads), whole.device)
        if not self.stacked:
            edited.movedim(heads_axis, 0)[head] = replacement.movedim(heads_axis, 0)
            return edited
        copies = edited.unflatten(0, (len(self.heads), -1)).movedim(heads_axis + 1, 1)
        copies[copy, head] = replacement.movedim(heads_axis, 0)
        return edited

    def scores_of_run(self) -> HeadScores:
        """Return the heads' scores of this run from its queries, keys and rotation, which are then forgotten."""
        q, k = self.taken("query"), self.taken("key")
        return self.scores_of(q, k, self.rotation(q.shape[1]))

    def scores_of(self, q: Tensor, k: Tensor, rotation: Rotation | None) -> HeadScores:
        """Return the heads' scores from what passes `hook_q` and `hook_k`."""
        require_even_scale(self.layer, self.layer.layer, q.shape[1])
        # Folded biases depend on the weights, and gradients go through them and the gains.
        read = self.view.raw(self.layer.layer) if torch.is_grad_enabled() else self.layer
        of_run = HeadScores.of_run(read, self.heads, q, k, rotation, select=partial(self.selected, heads_axis=2))
        return replace(of_run, layer=self.layer)  # with and without gradients a part sees the same layer

    def rotation(self, n_positions: int) -> Rotation | None:
        """Return the rotation that this run applied to the heads; None without rotary positions."""
        geometry = self.layer.rotary
        if geometry is None:
            return None
        names = self.names
        seen = self.seen.get(get_ident(), {})
        captured = {names[point]: seen.pop(point) for point in ("cos", "sin") if point in seen}
        tables = self.view.rotary_tables(self.layer.layer, n_positions, captured)
        if tables is None:
            return Rotation(geometry, *geometry.position_tables(n_positions)).of_heads(self.heads)
        cos, sin = (per_pair(table, geometry) for table in tables)
        batched = cos.ndim == geometry.theta.ndim + 2 and len(cos) > 1
        if self.stacked and batched:  # every copy has the same positions
            cos, sin = (table[: len(table) // len(self.heads)] for table in (cos, sin))
        return Rotation(geometry, cos, sin).of_heads(self.heads)

    def require_lengths(self, *lengths: int) -> None:
        """Refuse a run with a key/value cache: not all of its activations have one length. Raises EditNotHonored."""
        if len(set(lengths)) > 1:
            raise EditNotHonored(
                f"layer {self.layer.layer}: scores, queries and keys of this run have lengths {lengths}: a key/value "
                "cache is in use; run without it (use_past_kv_cache=False)"
            )

    @torch.no_grad()
    def require_own_scores(self, scores: Tensor, of_run: HeadScores) -> None:
        """Refuse a run whose scores, scaled and capped, do not follow from its queries and keys. Raises EditNotHonored.

        Compared are unmasked pairs of the first sequence.
        """
        # Without ALiBi, of which implementations differ by a constant in each query's row.
        rebuilt = softcapped(of_run.first().whole(), self.layer.softcap)
        scores = self.selected(scores, heads_axis=1)[:1]
        visible = self.visible(scores)
        off = scores.to(rebuilt) - rebuilt
        if self.layer.alibi is not None:
            off = off - self.layer.alibi.bias(torch.arange(scores.shape[-1]))[self.heads][:, None].to(off)
            # The softmax does not see the constant.
            off = off - off.masked_fill(~visible, 0.0).sum(-1, keepdim=True) / visible.sum(-1, keepdim=True)
        worst, largest = (x.masked_fill(~visible, 0.0).abs().amax((0, 2, 3)) for x in (off, scores.to(rebuilt)))
        require_close(
            worst,  # by head, so that a small one is seen
            largest,
            scores.dtype,
            "live scores",
            [
                f"layer {self.layer.layer}, head {head}: the model's scores are not those of this run's queries and "
                "keys; they differ"
                for head in self.heads
            ],
            "the part to be removed is no part of them: enter the ablation after hooks that edit queries "
            "or keys, and see whether verify_scores passes on this model",
            EditNotHonored,
        )

    def prove_scores(self) -> None:
        """Prove by a short run that edits of the layer's scores count, and that they are what its operators give."""
        require_honoured(self.view, self.layer.layer, "scores", checks=partial(own_scores_required, self.view))

    def values(self, captured: Tensor, like: Tensor) -> Float[Tensor, "batch heads pos d_head"]:
        """Return the values that the heads read, from what passes `hook_v`, in the type and on the device of `like`."""
        by_head = self.layer.values(captured)
        heads = keys_read(self.heads, self.layer.n_heads, by_head.shape[2])
        return self.selected(by_head, heads, heads_axis=2).transpose(1, 2).to(like)

    def visible(self, scores: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Return which of the layer's scores are of keys that the query sees."""
        return self.view.reader.unmasked(self.view.model, self.layer.layer, scores)

    def require_own_z(self, z: Float[Tensor, "batch pos heads d_head"], rebuilt: Tensor, *, delegated: bool) -> None:
        """Refuse a run in which the z of the heads is not `rebuilt` from its own scores. Raises EditNotHonored.

        Rows of `rebuilt` that are 0 throughout see no key (padding) and are left out.
        """
        # Per token, so that one padded sequence in a large batch is seen.
        blind = (rebuilt.detach() == 0).flatten(2).all(-1) & (not delegated)
        off, size = (x.detach().flatten(2).norm(dim=-1) for x in (rebuilt - z.to(rebuilt), z.to(rebuilt)))
        said = (
            f"layer {self.layer.layer}: the z of this run is not that of its own scores and values; they differ",
            "enter the context after all hooks that edit scores, patterns, values or z of this layer (attention sinks "
            "are not modelled)",
        )
        if delegated:
            said = self.not_of_own_keys("output")
        off = off.masked_fill(blind, 0.0)
        require_close(off, size.clamp_min(size.mean()), z.dtype, "live z", *said, EditNotHonored)

    def not_of_own_keys(self, what: str) -> tuple[str, str]:
        """Return text and advice for a layer that delegates its attention and does not give the heads' own."""
        return (
            f"layer {self.layer.layer}: this bridge computes attention itself, and its {what} of heads {self.heads} is "
            "not that of attention over this run's own keys; they differ",
            "look for a key/value cache (run with use_past_kv_cache=False), padding, or another hook or open context "
            "that edits these heads, or ablate on another backend",
        )


def own_scores_required(view: AttentionView, layer: int) -> list[Hook]:
    """Return hooks that refuse a run in which the scores of a layer are not what its operators give."""
    names, held = view.hook_names(layer), {}

    def compare(scores: Tensor, hook: Any) -> None:
        # Read here, so that hooks of all layers hold one layer's weights at a time.
        folded = view.layer(layer)
        every_head = HeadCapture(view, folded, list(range(folded.n_heads)))
        for point in points:
            if names[point] in held:
                every_head.hold(point, held.pop(names[point]))
        every_head.require_own_scores(scores, every_head.scores_of_run())

    points = [point for point in ("query", "key", "cos", "sin") if point in names]
    return [*holding(held, (names[point] for point in points)), (names["scores"], compare)]


@lru_cache(maxsize=256)
def head_indices(heads: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return indices of copies of a batch, and of the head of each. Lists would be copied to a GPU at each use."""
    with torch.inference_mode(False):
        return torch.arange(len(heads), device=device), torch.tensor(heads, dtype=torch.long, device=device)
