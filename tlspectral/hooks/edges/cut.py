"""Whole writes of senders taken out of what receivers read, for path patching, circuits and their estimates."""

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
    """What is taken out of the streams of some receivers of one kind in a layer.

    Attributes:
        receivers: their indices among the receivers of the kind.
        rows: of the batch.
        removed: of each of them, or one for all.
    """

    receivers: list[int]
    rows: slice
    removed: Float[Tensor, "receivers rows pos d_model"]


@dataclass(frozen=True)
class ReceiverInput:
    """How the receivers of one kind in one layer read the residual stream at a hook point, prepared for many runs.

    `what` is q, k, v, mlp or logits, for which `layer` is the last one and `reads` None. `names` are the layer's hook
    points.
    """

    layer: int
    what: str
    names: dict[str, str]
    reads: LayerReads | MlpReads | None

    @property
    def point(self) -> str:
        """Name of the hook point of what is read."""
        if isinstance(self.reads, MlpReads):
            return self.reads.point
        return self.names["residual_after" if self.reads is None else self.reads.point]

    @property
    def streams(self) -> tuple[str, ...]:
        """The points of the layer whose sum is read; none where it is what is read itself."""
        return self.reads.reads if isinstance(self.reads, MlpReads) else ("residual",) * (self.reads is not None)

    def hooks(self, cuts: Callable[[], list[Cut]]) -> list[Hook]:
        """Return hooks that take what is cut out of what the receivers read; `cuts` is called while the model runs."""
        held: dict[str, Tensor] = {}

        def edit(read: Tensor, hook: Any) -> Tensor:
            x = self._stream(held) if self.reads is not None else widened(read)
            if isinstance(self.reads, LayerReads):
                return without(read, x, self.reads, cuts())
            if isinstance(self.reads, MlpReads) and acts_first(hook, edit):
                # The norm of a HookedTransformer in 16 bits hands on float32, of a stream that is rounded.
                types = (read.dtype, *(held[self.names[point]].dtype for point in self.streams))
                stored = max(types, key=lambda dtype: torch.finfo(dtype).eps)
                with torch.no_grad():
                    self.reads.require_own_read(read, x, stored, f"layer {self.layer}, MLP")
            removed = torch.zeros_like(x)
            for _, rows, (one,) in cuts():
                removed[rows] += one.to(x)
            return (x - removed).to(read) if self.reads is None else self.reads.changed(read, x, removed)

        return [*holding(held, (self.names[point] for point in self.streams)), (self.point, edit)]

    def _stream(self, passed: Mapping[str, Tensor]) -> Float[Tensor, "batch pos d_model"]:
        streams = {point: widened(passed[self.names[point]]) for point in self.streams}
        return self.reads.stream(streams) if isinstance(self.reads, MlpReads) else streams["residual"]

    def gradient(
        self, of_read: Float[Tensor, "*shape"], passed: Mapping[str, Tensor]
    ) -> Float[Tensor, "receivers batch pos d_model"]:
        """Carry a gradient at what is read back to the stream of each receiver.

        `passed` is what the run had at the hook points of `streams`.
        """
        if self.reads is None:
            return of_read[None]
        x = self._stream(passed)
        if isinstance(self.reads, MlpReads):
            return self.reads.gradient(of_read, x)[None]
        by_head = reduce(  # repeated keys are summed
            self.reads.by_head(of_read),
            "batch pos (head copy) d_head -> batch pos head d_head",
            "sum",
            head=len(self.reads.weight),
        )
        return self.reads.gradient(by_head, x)


def receiver_inputs(view: AttentionView, layer: int, what: Any) -> list[ReceiverInput]:
    """Return how one kind of receivers reads, by hook point. Raises as `AttentionView.raw` and `mlp_reads`."""
    layer = min(layer, view.n_layers - 1)
    if what in INPUT_POINTS:
        reads = layer_reads(view.raw(layer), what, widened)
    else:
        reads = [mlp_reads(view, layer) if what == "mlp" else None]
    return [ReceiverInput(layer, what, view.hook_names(layer), one) for one in reads]


def without(
    captured: Float[Tensor, "batch pos *width"],
    x: Float[Tensor, "batch pos d_model"],
    reads: LayerReads,
    cuts: Iterable[Cut],
) -> Float[Tensor, "batch pos *width"]:
    """Return queries, keys or values of a layer as heads compute them from the stream `x` without what is cut.

    Where nothing is removed they are kept to the bit.
    """
    edited = captured.clone(memory_format=torch.contiguous_format)
    by_head = rearrange(  # some models repeat keys and values, one per query head
        reads.by_head(edited), "batch pos (head copy) d_head -> batch pos head copy d_head", head=len(reads.weight)
    )
    for receivers, rows, removed in cuts:
        heads, of_rows = reads.heads_of(receivers), by_head[rows]
        stream, removed = x[rows], removed.to(x)
        one = len(removed) == 1
        change = reads.change(stream, removed[0], heads) if one else reads.change_of_each(stream, removed, heads)
        # An activation of a model spread over several devices moves inside a layer.
        change = change.to(edited.device)[:, :, :, None]
        of_rows[:, :, heads] = (widened(of_rows[:, :, heads]) + change).to(edited)
    return edited
