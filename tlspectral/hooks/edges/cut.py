"""Subtract writes of senders from the input of receivers, for path patching, circuits and their estimates."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange, reduce
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.models.hooking.placing import Hook, acts_first, holding
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.mlp import MlpReads, mlp_reads
from tlspectral.models.stream.writes import INPUT_POINTS, LayerReads, layer_reads


class Cut(NamedTuple):
    """Writes to subtract from the residual stream that some receivers of one layer and one kind read.

    Attributes:
        receivers: indices among the layer's receivers of this kind (queries, keys, values, MLP or logits).
        rows: rows of the batch in which to subtract.
        removed: the tensor to subtract, one per receiver or one for all.
    """

    receivers: list[int]
    rows: slice
    removed: Float[Tensor, "receivers rows pos d_model"]


@dataclass(frozen=True)
class ReceiverInput:
    """How the receivers of one kind in one layer read the residual stream at one hook point, prepared for many runs.

    Attributes:
        layer: index of the layer; for logits the last layer.
        what: kind of the receivers: "q", "k", "v", "mlp" or "logits".
        names: dict from short names ("query", "residual", ...) to the full names of the layer's hook points.
        reads: norm and weights between the stream and the hook point; None for logits.
    """

    layer: int
    what: str
    names: dict[str, str]
    reads: LayerReads | MlpReads | None

    @property
    def point(self) -> str:
        """Full name of the hook point whose activation the receivers read."""
        if isinstance(self.reads, MlpReads):
            return self.reads.point
        return self.names["residual_after" if self.reads is None else self.reads.point]

    @property
    def streams(self) -> tuple[str, ...]:
        """Short names of the hook points whose sum the receivers read; empty for logits, which are read directly."""
        return self.reads.reads if isinstance(self.reads, MlpReads) else ("residual",) * (self.reads is not None)

    def hooks(self, cuts: Callable[[], list[Cut]]) -> list[Hook]:
        """Return hooks that subtract writes from the stream that the receivers read, as pairs (hook point, hook).

        `cuts` is a function without arguments that returns the writes as `Cut`s; it is called while the model runs. The
        hooks replace the receivers' activation (queries, keys, values, MLP input) by one computed from the changed
        stream; the stream itself stays.
        """
        held: dict[str, Tensor] = {}

        def edit(read: Tensor, hook: Any) -> Tensor:
            """Return the receivers' activation `read`, computed again from the stream minus the cuts."""
            x = self._stream(held) if self.reads is not None else widened(read)
            if isinstance(self.reads, LayerReads):
                return without(read, x, self.reads, cuts())
            if isinstance(self.reads, MlpReads) and acts_first(hook, edit):
                # In 16 bits the norm of a HookedTransformer returns float32, computed from a rounded stream.
                types = (read.dtype, *(held[self.names[point]].dtype for point in self.streams))
                stored = max(types, key=lambda dtype: torch.finfo(dtype).eps)
                with torch.no_grad():
                    self.reads.require_own_read(read, x, stored, f"layer {self.layer}, MLP")
            removed = torch.zeros_like(x)
            for _, rows, (write,) in cuts():
                removed[rows] += write.to(x)
            return (x - removed).to(read) if self.reads is None else self.reads.changed(read, x, removed)

        return [*holding(held, (self.names[point] for point in self.streams)), (self.point, edit)]

    def _stream(self, passed: Mapping[str, Tensor]) -> Float[Tensor, "batch pos d_model"]:
        streams = {point: widened(passed[self.names[point]]) for point in self.streams}
        return self.reads.stream(streams) if isinstance(self.reads, MlpReads) else streams["residual"]

    def gradient(
        self, of_read: Float[Tensor, "*shape"], passed: Mapping[str, Tensor]
    ) -> Float[Tensor, "receivers batch pos d_model"]:
        """Return the gradient in the residual stream of each receiver, from the gradient at the receivers' hook point.

        `of_read` is the gradient at the hook point. `passed`: activations of the run at the hook points of `streams`,
        by full name.
        """
        if self.reads is None:
            return of_read[None]
        x = self._stream(passed)
        if isinstance(self.reads, MlpReads):
            return self.reads.gradient(of_read, x)[None]
        by_head = reduce(  # some models repeat keys; gradients of the copies are summed
            self.reads.by_head(of_read),
            "batch pos (head copy) d_head -> batch pos head d_head",
            "sum",
            head=len(self.reads.weight),
        )
        return self.reads.gradient(by_head, x)


def receiver_inputs(view: AttentionView, layer: int, what: Any) -> list[ReceiverInput]:
    """Return a `ReceiverInput` for each hook point at which receivers of one kind in a layer read the stream.

    `view` is the model. `what` is the kind: "q", "k", "v", "mlp" or "logits". Gated attention has two hook points for
    "q". Raises UnsupportedArchitecture if the layer or its MLP cannot be read.
    """
    layer = min(layer, view.n_layers - 1)
    if what in INPUT_POINTS:
        reads = layer_reads(view.raw(layer), what, widened)
    else:
        reads = [mlp_reads(view, layer) if what == "mlp" else None]
    return [ReceiverInput(layer, what, view.hook_names(layer), read) for read in reads]


def without(
    captured: Float[Tensor, "batch pos *width"],
    x: Float[Tensor, "batch pos d_model"],
    reads: LayerReads,
    cuts: Iterable[Cut],
) -> Float[Tensor, "batch pos *width"]:
    """Return a copy of the queries, keys or values `captured` as heads compute them after some writes are subtracted.

    `x` is the residual stream, `reads` the norm and weights between it and `captured`, `cuts` the writes to subtract.
    `captured` and `x` are not changed. Entries of receivers that no cut names stay equal to the bit.
    """
    edited = captured.clone(memory_format=torch.contiguous_format)
    by_head = rearrange(  # some models repeat keys and values, one per query head
        reads.by_head(edited), "batch pos (head copy) d_head -> batch pos head copy d_head", head=len(reads.weight)
    )
    for receivers, rows, removed in cuts:
        heads, of_rows = reads.heads_of(receivers), by_head[rows]
        stream, removed = x[rows], removed.to(x)
        shared = len(removed) == 1
        change = reads.change(stream, removed[0], heads) if shared else reads.change_of_each(stream, removed, heads)
        # An activation of a model spread over several devices moves inside a layer.
        change = change.to(edited.device)[:, :, :, None]
        of_rows[:, :, heads] = (widened(of_rows[:, :, heads]) + change).to(edited)
    return edited
