"""Hooks of `ablate(..., into=)`: remove a part of heads only from the input of some receivers.

The sending heads run unchanged. A hook computes how removing the part would change their writes to the residual stream.
At the receivers, queries, keys or values are computed again from the changed stream, input norm included. This is path
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
from tlspectral.selection.node_names import Receiver


@dataclass
class EdgeRun:
    """The changes of the residual stream that the sending heads of one `ablate` block make in the current run.

    Attributes:
        senders: dict from layer to the heads that lose the part.
        removed: dict from thread to dict from layer to the tensor that is subtracted from the stream.
    """

    senders: dict[int, list[int]]
    removed: dict[int, dict[int, Tensor]] = field(default_factory=dict)

    def forget(self, activation: Any, hook: Any) -> None:
        """Drop the stored tensors of this thread. It is a hook at the start of a run and after its last receiver.

        The activation is not changed; `activation` and `hook` are not used.
        """
        self.removed.pop(get_ident(), None)

    def take(self, layer: int, removed: Float[Tensor, "batch pos d_model"]) -> None:
        """Store the tensor `removed` that the heads of a layer subtract from the stream in this run."""
        self.removed.setdefault(get_ident(), {})[layer] = removed

    def total(self, layer: int, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """Return the sum of the stored tensors of all senders, to subtract from the stream `x` at a receiver.

        `layer` is the receiver's layer, for messages; `x` is not changed. Raises EditNotHonored if a sender's layer did
        not run.
        """
        removed = self.removed.get(get_ident(), {})
        missing = [sender for sender in self.senders if sender not in removed]
        if missing or any(part.shape != x.shape for part in removed.values()):
            at = missing[0] if missing else min(removed)
            raise EditNotHonored(
                f"layer {layer}: the hook on the heads of layer {at} did not run, so their write cannot be subtracted: "
                "that layer was skipped (a sweep replays only later layers; so does start_at_layer), or some hooks of "
                f"the ablation were taken off the model: run the whole model inside the block{naming_open_contexts()}"
            )
        return torch.stack([part.to(x.device) for part in removed.values()]).sum(0)


@dataclass
class EdgeSender:
    """Hooks on the sending heads of one layer: they compute how removing the part would change the heads' writes.

    Attributes:
        ablation: the heads and the part; its hooks measure the change and edit nothing.
        run: stores the change for the hooks on the receivers.
    """

    ablation: LayerAblation
    run: EdgeRun

    def hooks(self) -> list[Hook]:
        """Return a `fwd_hooks` list that measures the change of the heads' writes and edits no activation.

        Raises EditNotHonored if a short run shows that removing the part here would not change the logits.
        """
        ablation, names = self.ablation, self.ablation.names
        ablation.prove()
        return [
            *ablation.measuring(),
            (names["z"], self._measure),
            (names["attention_out"], self._compare_written),
        ]

    def _measure(self, z: Tensor, hook: Any) -> None:
        """Store in `run` the tensor that removing the part subtracts from the stream; `z` is not changed.

        It also keeps the sum of all heads' writes, for `_compare_written`. `hook` is not used.
        """
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
        """Raise EditNotHonored if the output of attention is not the sum of the heads' writes and the biases.

        `attention` is the activation at the hook point of this output; it is not changed.
        """
        written = self.ablation.taken("written")
        attention = attention * self.ablation.view.attention_factor(self.ablation.layer.layer)
        require_close(
            (attention[:1].to(written) - written).abs().max(),
            written.abs().max(),
            attention.dtype,
            "stream",
            f"layer {self.ablation.layer.layer}: the output of the attention is not the sum of its heads' writes; "
            "they differ",
            "enter the context after hooks and ablations that edit z or the output of attention in this layer",
            EditNotHonored,
        )


@dataclass(repr=False)
class EdgeReceiver(HeadCapture):
    """Hooks on the receivers of one layer: they compute queries, keys or values again without the senders' part.

    Attributes:
        heads: the receivers; for keys and values, key/value heads.
        what: "q", "k" or "v".
        point: short name of the edited hook point, such as "query".
        run: changes of the stream by the senders in the current run.
    """

    what: Input
    point: str
    run: EdgeRun

    @property
    def head_names(self) -> str:
        """Names of the receivers, joined by commas: "L1KV0.k, L1KV1.k"."""
        shared = self.what != "q" and self.layer.n_kv_heads < self.layer.n_heads
        return ", ".join(Receiver(self.layer.layer, head, self.what, shared).name for head in self.heads)

    def hooks(self) -> list[Hook]:
        """Return a `fwd_hooks` list that edits the receivers' queries, keys or values.

        Raises EditNotHonored if a short run shows that an edit of these inputs does not change the logits.
        """
        require_honoured(self.view, self.layer.layer, self.point)
        return [*self.holders("residual"), (self.names[self.point], self._edit)]

    @torch.no_grad()
    def _require_own_reads(self, captured: Tensor, x: Tensor, reads: LayerReads) -> None:
        """Raise EditNotHonored if the queries, keys or values `captured` do not follow from the residual stream `x`.

        `reads` are the norm and weights between the two. The first sequence is compared. The bias of values is not
        known, so for values the difference only has to be equal at all tokens.
        """
        heads = list(range(len(reads.weight))) if reads.joint else self.heads
        by_head = reads.by_head(captured[:1])
        size = by_head.shape[2] // len(reads.weight)  # some models repeat keys per query head
        in_run = widened(by_head[:, :, [head * size for head in heads]])
        left = in_run - reads.from_stream(widened(x[:1]))[:, :, heads]
        off = (left - left.mean(1, keepdim=True) if self.what == "v" else left).abs().amax((0, 1, 3))
        largest = in_run.abs().amax((0, 1, 3))
        require_close(
            off,
            largest,
            captured.dtype,
            "live reads",
            [
                f"layer {self.layer.layer}, head {head}: the {INPUT_POINTS[self.what]} of this run does not follow "
                "from its residual stream; they differ"
                for head in heads
            ],
            "take off hooks that edit the input of attention or its norm, and enter the context after hooks that edit "
            "the residual stream, queries, keys or values",
            EditNotHonored,
        )

    def _edit(self, captured: Float[Tensor, "batch pos *width"], hook: Any) -> Tensor:
        """Return a copy of `captured` (queries, keys or values) as the receivers read it without the senders' part.

        It is computed from the stream minus the senders' tensors; only the receivers' entries change. `hook` is the
        hook point. Raises EditNotHonored if another open block edits one of the receivers, if a sender's layer did not
        run, or if `captured` does not follow from the stream.
        """
        refuse_open_receivers([hook], self.what, self.heads, of=self)
        # An activation of a model spread over several devices moves inside a layer.
        x = widened(self.taken("residual")).to(captured.device)
        removed = self.run.total(self.layer.layer, x).to(x.dtype)
        every = layer_reads(self.view.raw(self.layer.layer), self.what, widened)
        reads = next(candidate for candidate in every if candidate.point == self.point)
        if acts_first(hook, self._edit):
            self._require_own_reads(captured, x, reads)
        return without(captured, x, reads, [Cut(self.heads, slice(None), removed[None])])


def refuse_open_receivers(points: Iterable[Any], what: Input, heads: list[int], of: EdgeReceiver | None = None) -> None:
    """Raise EditNotHonored if another open `ablate(..., into=)` block edits one of these receivers.

    `points`: hook points of the layer, as modules; None entries are skipped. `what`, `heads`: input ("q", "k", "v") and
    indices of the receivers. `of`: the hooks whose own block is not counted; None: all blocks count.
    """
    for point in points:
        for handle in getattr(point, "fwd_hooks", ()):
            other = getattr(getattr(handle.user_hook, "hook", handle.user_hook), "__self__", None)
            if not isinstance(other, EdgeReceiver) or other.what != what or (of is not None and other.run is of.run):
                continue
            if twice := set(other.heads) & set(heads):
                raise EditNotHonored(
                    f"{point.name}: an open context edits head {min(twice)} there already: give all senders of a "
                    f"receiver in one context, and measure edges outside of it{naming_open_contexts()}"
                )
