"""The exact effect of single edges: one receiver reads its stream without the difference of one sender's writes."""

from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.pairs import Pairs
from tlspectral.hooks.circuits.run import Layer
from tlspectral.models.attention.threads import Hook
from tlspectral.models.attention.writes import INPUT_POINTS, Input, LayerReads
from tlspectral.selection import Receiver
from tlspectral.tables.progress import bar
from tlspectral.tasks import intact_values, replayed_values


def single_cuts(pairs: Pairs, edges: Int[np.ndarray, "edges 2"]) -> Float64[np.ndarray, "edges pairs"]:
    """Return metric(one edge cut to its counterfactual) - metric(clean) of each pair, for rows (receiver, sender).

    Blocks are replayed from the layer of the receiver on, several edges stacked in one batch.
    """
    graph, sequences = pairs.graph, pairs.sequences
    ends = [graph.receivers[row] for row, _ in edges]
    kinds = [(min(end.layer, graph.view.n_layers - 1), end.input) for end in ends]
    order = sorted(range(len(edges)), key=kinds.__getitem__)
    intact, values = intact_values(graph.view, sequences, {layer for layer, _ in kinds})
    senders, place = np.unique(edges[:, 1], return_inverse=True)
    differences = torch.cat([pairs.differences(batch)[senders].cpu() for batch in pairs.batches()], 1)
    effects = np.zeros((len(edges), len(values)))
    with bar(len(edges), "edges", "edge") as shown:
        for (layer, _), group in groupby(order, key=kinds.__getitem__):
            chosen = list(group)

            def hooks_of(jobs: slice, batch: slice, chosen: list[int] = chosen, layer: int = layer) -> list[Hook]:
                some = chosen[jobs]
                removed = differences[place[some]][:, batch]
                return _Cut(graph, pairs.layers[layer], [ends[at] for at in some], removed).hooks()

            effects[chosen] = replayed_values(intact, sequences, layer, len(chosen), hooks_of) - values
            shown.update(len(chosen))
    return effects


@dataclass
class _Cut:
    """Edits of one kind of receiver in one layer: copy i of the batch is without the i-th edge."""

    graph: Graph
    layer: Layer
    ends: list[Receiver]
    removed: Float[Tensor, "edges pairs pos d_model"]
    seen: dict[str, Tensor] = field(default_factory=dict)

    def hooks(self) -> list[Hook]:
        """Return the hooks of a run whose batch is a copy of the prompts for each edge."""
        what, names = self.ends[0].input, self.layer.names
        if what == "logits":
            return [(names["residual_after"], self._edit_last)]
        if what == "mlp":
            mlp = self.graph.mlps[self.ends[0].layer]
            assert mlp is not None
            held: list[Hook] = [(names[point], partial(self._hold, point)) for point in mlp.reads]
            return [*held, (mlp.point, partial(self._edit_mlp, mlp))]
        edit = (names[INPUT_POINTS[what]], partial(self._edit, what))
        return [(names["residual"], partial(self._hold, "residual")), edit]

    def _hold(self, name: str, activation: Tensor, hook: Any) -> None:
        self.seen[name] = widened(activation)

    def _rows(self, like: Tensor) -> Tensor:
        return self.removed.flatten(0, 1).to(like)

    def _edit_last(self, x: Tensor, hook: Any) -> Tensor:
        return (widened(x) - self._rows(widened(x))).to(x)

    def _edit_mlp(self, mlp: Any, read: Tensor, hook: Any) -> Tensor:
        x = mlp.stream(self.seen)
        return mlp.changed(read, x, self._rows(x))

    def _edit(self, what: Input, captured: Tensor, hook: Any) -> Tensor:
        reads, x = self.layer.reads[what], self.seen["residual"]
        edited = captured.reshape(*captured.shape[:2], -1, reads.weight.shape[-1]).clone()
        copies, streams = (tensor.unflatten(0, (len(self.ends), -1)) for tensor in (edited, x))
        size = edited.shape[2] // len(reads.weight)  # some models repeat keys and values, one per query head
        for end, copy, stream, removed in zip(self.ends, copies, streams, self.removed.to(x), strict=True):
            own = LayerReads(reads.norm, reads.weight[[end.head]])
            copy[:, :, end.head * size : (end.head + 1) * size] += own.change(stream, removed).to(copy)
        return edited.reshape(captured.shape)
