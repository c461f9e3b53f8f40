"""What receivers read when edges are cut: their residual stream without what these carry, every norm taken again."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.models.attention import AttentionView
from tlspectral.models.attention.threads import Hook, holding
from tlspectral.models.attention.writes import INPUT_POINTS, LayerReads, MlpReads, layer_reads, mlp_reads

Cut = tuple[int, slice, Tensor]
"""Index of a receiver among those of its kind in a layer, rows of the batch, and what is taken out of its stream."""


@dataclass(frozen=True)
class Reader:
    """How the receivers of one kind in one layer read the residual stream at a hook point, prepared for many runs.

    Attributes:
        layer: its index; the last one for the logits.
        what: q, k, v, mlp or logits.
        names: hook points of the layer.
        reads: of queries, keys or values: `LayerReads` of all heads; of an MLP: `MlpReads`; else None.
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

    def hooks(self, cuts: Callable[[], Iterable[Cut]]) -> list[Hook]:
        """Return hooks that take what is cut out of what the receivers read; `cuts` is called while the model runs."""
        held: dict[str, Tensor] = {}

        def edit(read: Tensor, hook: Any) -> Tensor:
            x = self._stream(held) if self.reads is not None else widened(read)
            if isinstance(self.reads, LayerReads):
                return without(read, x, self.reads, cuts())
            removed = torch.zeros_like(x)
            for _, rows, one in cuts():
                removed[rows] += one.to(x)
            return (x - removed).to(read) if self.reads is None else self.reads.changed(read, x, removed)

        return [*holding(held, (self.names[point] for point in self.streams)), (self.point, edit)]

    def _stream(self, passed: Mapping[str, Tensor]) -> Float[Tensor, "batch pos d_model"]:
        """Return the stream that is read, from what passed the points of `streams`, by their hook points."""
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
        by_head = self.reads.by_head(of_read).unflatten(2, (len(self.reads.weight), -1)).sum(3)  # of repeated keys
        return self.reads.gradient(by_head, x)


def readers(view: AttentionView, layer: int, what: Any) -> list[Reader]:
    """Return how one kind of receivers reads, by hook point. Raises as `AttentionView.raw` and `mlp_reads`."""
    layer = min(layer, view.n_layers - 1)
    if what in INPUT_POINTS:
        reads = layer_reads(view.raw(layer), what, widened)
    else:
        reads = [mlp_reads(view, layer) if what == "mlp" else None]
    return [Reader(layer, what, view.hook_names(layer), one) for one in reads]


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
    by_head = reads.by_head(edited)
    size = by_head.shape[2] // len(reads.weight)  # some models repeat keys and values, one per query head
    for receiver, rows, removed in cuts:
        heads = reads.heads_of(receiver)
        held = by_head.unflatten(2, (-1, size))[rows, :, heads]
        # An activation of a model spread over several devices moves inside a layer.
        change = reads.change(x[rows], removed.to(x), heads).to(edited.device)
        held[:] = (widened(held) + change[:, :, :, None]).to(edited)
    return edited
