"""The exact effect of single edges: one receiver reads its stream without the difference of one sender's writes."""

from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.pairs import Pairs
from tlspectral.hooks.circuits.run import Layer
from tlspectral.models.attention.replay import IntactRun, module_hooks
from tlspectral.models.attention.threads import Hook, hooks_on
from tlspectral.models.attention.writes import INPUT_POINTS, Input, LayerReads
from tlspectral.selection import Receiver
from tlspectral.tables.progress import bar
from tlspectral.tasks import Scores, intact_values


def single_cuts(pairs: Pairs, edges: Int[np.ndarray, "edges 2"]) -> Float64[np.ndarray, "edges pairs"]:
    """Return metric(one edge cut to its counterfactual) - metric(clean) of each pair, for rows (receiver, sender).

    Blocks are replayed from the layer of the receiver on, several edges stacked in one batch.
    """
    graph, sequences = pairs.graph, pairs.sequences
    of_layer = [min(graph.receivers[row].layer, graph.view.n_layers - 1) for row, _ in edges]
    kinds = [(layer, graph.receivers[row].input) for layer, (row, _) in zip(of_layer, edges, strict=True)]
    order = sorted(range(len(edges)), key=kinds.__getitem__)
    intact, values = intact_values(graph.view, sequences, set(of_layer))
    n = len(sequences.tokens)
    differences = torch.cat([pairs.differences(batch)[np.unique(edges[:, 1])].cpu() for batch in pairs.batches()], 1)
    place = {sender: index for index, sender in enumerate(np.unique(edges[:, 1]))}
    effects = np.zeros((len(edges), n))
    stack = max(1, sequences.rows_at_once(graph.view) // n)
    with torch.no_grad(), bar(len(edges), "edges", "edge") as shown:
        for (layer, _), group in groupby(order, key=kinds.__getitem__):
            chosen = list(group)
            for first in range(0, len(chosen), stack):
                some = chosen[first : first + stack]
                ends = [graph.receivers[edges[at][0]] for at in some]
                scores = Scores(sequences, len(some))
                for batch in sequences.batches(graph.view):
                    removed = differences[[place[edges[at][1]] for at in some]][:, batch]
                    cut = _Cut(graph, pairs.layers[layer], ends, removed)
                    scores.add(batch, cut.logits(intact, layer, batch))
                effects[some] = scores.result().numpy() - values
                shown.update(len(some))
    return effects


@dataclass
class _Cut:
    """Edits of one kind of receiver in one layer: copy i of the batch is without the i-th edge."""

    graph: Graph
    layer: Layer
    ends: list[Receiver]
    removed: Tensor  # [edges, pairs, pos, d_model]
    x: Tensor | None = None
    attention: Tensor | None = None

    def logits(self, intact: IntactRun, layer: int, batch: slice) -> Tensor:
        what, names, model = self.ends[0].input, self.layer.names, self.graph.view.model
        hooks: list[Hook] = [(names["residual"], partial(self._hold, "x"))]
        placing = []
        if what == "logits":
            hooks.append((names["residual_after"], self._edit_last))
        elif what == "mlp":
            mlp = self.graph.mlps[layer]
            assert mlp is not None
            hooks.append((names["attention_out"], partial(self._hold, "attention")))
            placing.append(mlp.placing(partial(self._edit_mlp, mlp)))
        else:
            hooks.append((names[INPUT_POINTS[what]], partial(self._edit, what)))
        with module_hooks(placing), hooks_on(model, intact.points, hooks):
            return intact.replay(layer, batch, len(self.ends))

    def _hold(self, name: str, activation: Tensor, hook: Any) -> None:
        setattr(self, name, widened(activation))

    def _rows(self, like: Tensor) -> Tensor:
        return self.removed.flatten(0, 1).to(like)

    def _edit_last(self, x: Tensor, hook: Any) -> Tensor:
        return (widened(x) - self._rows(widened(x))).to(x)

    def _edit_mlp(self, mlp: Any, read: Tensor) -> Tensor:
        assert self.x is not None
        x = self.x if mlp.parallel else self.x + self.attention
        return mlp.changed(read, x, self._rows(x))

    def _edit(self, what: Input, captured: Tensor, hook: Any) -> Tensor:
        reads, x = self.layer.reads[what], self.x
        assert x is not None
        edited = captured.reshape(*captured.shape[:2], -1, reads.weight.shape[-1]).clone()
        copies, streams = (tensor.unflatten(0, (len(self.ends), -1)) for tensor in (edited, x))
        size = edited.shape[2] // len(reads.weight)  # some models repeat keys and values, one per query head
        for end, copy, stream, removed in zip(self.ends, copies, streams, self.removed.to(x), strict=True):
            own = LayerReads(reads.norm, reads.weight[[end.head]])
            copy[:, :, end.head * size : (end.head + 1) * size] += own.change(stream, removed).to(copy)
        return edited.reshape(captured.shape)
