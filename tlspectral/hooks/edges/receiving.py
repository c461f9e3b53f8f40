"""A part of heads taken out of what receivers read, by forward hooks: the edges of `ablate(..., into=)`.

The senders run as they are. What removing the part would change of the residual stream is measured behind them, and the
change of the queries, keys or values that are receivers is added there, the input norm taken again. This is path
patching of the direct path from sender to receiver (Goldowsky-Dill et al. 2023, "Localizing Model Behavior with Path
Patching", section 2), with any part of a head as the corruption.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored
from tlspectral.hooks.capture import HeadCapture
from tlspectral.hooks.edges.cut import Cut, without
from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.hooks.probe import require_honoured
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.hooking.exclusive import naming_open_contexts
from tlspectral.models.hooking.placing import Hook, acts_first
from tlspectral.models.stream.writes import INPUT_POINTS, Input, LayerReads, head_writes, layer_reads, z_of
from tlspectral.selection import Receiver


@dataclass
class EdgeRun:
    """What the senders of one context take out of the residual stream, by thread (of its current run) and layer.

    `senders` are heads by layer.
    """

    senders: dict[int, list[int]]
    removed: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def forget(self, activation: Any, hook: Any) -> None:
        """Drop what a run has left: in front of the first layer what broke off, behind the last receiver the rest."""
        self.removed.pop(get_ident(), None)

    def take(self, layer: int, removed: Float[Tensor, "batch pos d_model"]) -> None:
        """Note what the heads of one layer take out."""
        self.removed.setdefault(get_ident(), {})[layer] = removed

    def total(self, layer: int, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return what all senders take out of the stream `x` that enters the layer of a receiver."""
        removed = self.removed.get(get_ident(), {})
        missing = [sender for sender in self.senders if sender not in removed]
        if missing or any(part.shape != x.shape for part in removed.values()):
            at = missing[0] if missing else min(removed)
            raise EditNotHonored(
                f"layer {layer}: what the heads of layer {at} write was not seen in this run, so it cannot be taken "
                "out: that layer was skipped (by a sweep, which replays later layers alone, or by start_at_layer), or "
                f"some hooks of the ablation were taken off the model{naming_open_contexts()}"
            )
        return torch.stack([part.to(x.device) for part in removed.values()]).sum(0)


@dataclass
class EdgeSender:
    """The hooks that measure, in one layer, what removing a part of heads would change of the residual stream."""

    ablation: LayerAblation
    run: EdgeRun

    def hooks(self) -> list[Hook]:
        """Return a `fwd_hooks` list that changes no activation. Raises EditNotHonored as `LayerAblation.hooks`."""
        ablation, names = self.ablation, self.ablation.names
        ablation.prove()
        return [
            *ablation.measuring(),
            (names["z"], self._measure),
            (names["attention_out"], self._compare_written),
        ]

    def _measure(self, z: Tensor, hook: Any) -> None:
        ablation, layer = self.ablation, self.ablation.layer.layer
        writes = head_writes(ablation.view, layer, widened)
        z = z_of(z, writes.w_o)
        scale = writes.token_scale(z)
        self.run.take(layer, -writes.sum_of(ablation.change_of_head_output(z), scale, ablation.heads))
        with torch.no_grad():
            written = writes.sum_of(z[:1], scale[:1])
            ablation.hold("written", written + writes.of_biases(scale[:1]))

    @torch.no_grad()
    def _compare_written(self, attention: Tensor, hook: Any) -> None:
        written = self.ablation.taken("written")
        attention = attention * self.ablation.view.attention_factor(self.ablation.layer.layer)
        require_close(
            (attention[:1].to(written) - written).abs().max(),
            written.abs().max(),
            attention.dtype,
            "stream",
            f"layer {self.ablation.layer.layer}: the attention adds something else than was measured at its heads; "
            "they differ",
            "enter the context after hooks and ablations that edit z or the output of attention in this layer",
            EditNotHonored,
        )


@dataclass(repr=False)
class EdgeReceiver(HeadCapture):
    """The hooks that take what the senders wrote out of the queries, keys or values of one layer that are receivers.

    `heads` are the receivers: key/value heads for keys and values. `point` is the point of the `LayerReads` that is
    edited.
    """

    what: Input
    point: str
    run: EdgeRun

    @property
    def head_names(self) -> str:
        """The receivers by name."""
        shared = self.what != "q" and self.layer.n_kv_heads < self.layer.n_heads
        return ", ".join(Receiver(self.layer.layer, head, self.what, shared).name for head in self.heads)

    def hooks(self) -> list[Hook]:
        """Return a `fwd_hooks` list whose edits are proved to reach the output, else raise EditNotHonored."""
        require_honoured(self.view, self.layer.layer, self.point)
        return [*self.holders("residual"), (self.names[self.point], self._edit)]

    @torch.no_grad()
    def _require_own_reads(self, captured: Tensor, x: Tensor, reads: LayerReads) -> None:
        """Refuse a run whose queries, keys or values are not read from its residual stream. Raises EditNotHonored.

        The first sequence is compared. For values, whose bias is not read, what is left has to be the same at every
        token.
        """
        heads = list(range(len(reads.weight))) if reads.joint else self.heads
        by_head = reads.by_head(captured[:1])
        size = by_head.shape[2] // len(reads.weight)  # some models repeat keys per query head
        found = widened(by_head[:, :, [head * size for head in heads]])
        left = found - reads.from_stream(widened(x[:1]))[:, :, heads]
        off = (left - left.mean(1, keepdim=True) if self.what == "v" else left).abs().amax((0, 1, 3))
        largest = found.abs().amax((0, 1, 3))
        require_close(
            off,
            largest,
            captured.dtype,
            "live reads",
            [
                f"layer {self.layer.layer}, head {head}: the {INPUT_POINTS[self.what]} of this run is not what the "
                "operators read from its residual stream; they differ"
                for head in heads
            ],
            "a change of the stream cannot be carried to it: look for hooks that edit the input of attention or its "
            "norm, and enter the context after hooks that edit the residual stream, queries, keys or values",
            EditNotHonored,
        )

    def _edit(self, captured: Float[Tensor, "batch pos *width"], hook: Any) -> Tensor:
        refuse_open_receivers([hook], self.what, self.heads, of=self)
        # An activation of a model spread over several devices moves inside a layer.
        x = widened(self.taken("residual")).to(captured.device)
        removed = self.run.total(self.layer.layer, x).to(x.dtype)
        every = layer_reads(self.view.raw(self.layer.layer), self.what, widened)
        reads = next(one for one in every if one.point == self.point)
        if acts_first(hook, self._edit):
            self._require_own_reads(captured, x, reads)
        return without(captured, x, reads, [Cut(self.heads, slice(None), removed[None])])


def refuse_open_receivers(points: Iterable[Any], what: Input, heads: list[int], of: EdgeReceiver | None = None) -> None:
    """Refuse queries, keys or values that another open context edits too. Raises EditNotHonored.

    `points` are hook points of a layer, `heads` the receivers that are meant, and `of` the context that asks.
    """
    for point in points:
        for handle in getattr(point, "fwd_hooks", ()):
            other = getattr(getattr(handle.user_hook, "hook", handle.user_hook), "__self__", None)
            if not isinstance(other, EdgeReceiver) or other.what != what or (of is not None and other.run is of.run):
                continue
            if twice := set(other.heads) & set(heads):
                raise EditNotHonored(
                    f"{point.name}: an open context edits head {min(twice)} there already; give all senders of a "
                    f"receiver in one context, and measure edges outside it{naming_open_contexts()}"
                )
