"""Run a model with some of its edges kept: each receiver reads a residual stream of its own.

The model runs on the clean prompts. In its residual stream every sender writes what it computes in this run. A receiver
reads that stream without the difference between what a sender writes now and what it wrote on the counterfactual
prompt, summed over the edges that are cut. With all edges kept that is the clean run, with none the counterfactual one.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.models.attention.replay import Positions, logits_at
from tlspectral.models.attention.threads import Hook, hooks_on
from tlspectral.models.attention.writes import (
    INPUT_POINTS,
    HeadWrites,
    Input,
    LayerReads,
    head_writes,
    layer_reads,
    z_of,
)
from tlspectral.selection import Receiver

INPUTS: tuple[Input, ...] = ("q", "k", "v")


@dataclass(frozen=True)
class Layer:
    """How the heads of one layer read and write, prepared once for many runs; `writes` is None without heads."""

    reads: dict[Input, LayerReads]
    writes: HeadWrites | None
    names: dict[str, str]


def prepared_layers(graph: Graph) -> list[Layer]:
    """Return how the layers of a model read and write, in the type they are stored in, float32 at least."""
    view = graph.view
    return [
        Layer(
            {what: layer_reads(view.raw(index), what, widened) for what in INPUTS},
            head_writes(view, index, widened),
            view.hook_names(index),
        )
        if index in view.layers
        else Layer({}, None, view.hook_names(index))
        for index in range(view.n_layers)
    ]


@dataclass
class Stream:
    """What every sender writes in one run, or the difference from what it wrote in an earlier run.

    Attributes:
        then: what they wrote before; None in the run that is to be compared with.
        written: what they have written so far, in the order of `Graph.senders`; less `then` where that is given.
        held: activations that a later hook of the same layer needs.
    """

    graph: Graph
    layers: list[Layer]
    then: Float[Tensor, "senders batch pos d_model"] | None
    written: Float[Tensor, "senders batch pos d_model"]
    held: dict[str, Tensor] = field(default_factory=dict)

    def note(self, first: int, written: Float[Tensor, "some batch pos d_model"]) -> None:
        """Store what some senders write, from the given place on."""
        written = written.to(self.written)
        place = slice(first, first + len(written))
        self.written[place] = written if self.then is None else written - self.then[place]

    def hooks(self) -> list[Hook]:
        """Return hooks that note what is written, and change nothing."""
        found: list[Hook] = [(self.layers[0].names["residual"], self._embedding)]
        for index, layer in enumerate(self.layers):
            mlp = self.graph.mlps[index]
            found.append((layer.names["residual"], partial(self._hold, "residual")))
            if layer.writes is not None:
                found.append((layer.names["z"], partial(self._heads, index, layer.writes)))
                found.append((layer.names["attention_out"], partial(self._hold, "attention_out")))
            if self.graph.mixers[index]:
                behind = "residual_after" if mlp is None else "middle"
                found.append((layer.names[behind], partial(self._mixer, index, behind)))
            if mlp is not None:
                found.append((layer.names["mlp_out"], partial(self._mlp, index)))
        return found

    def _hold(self, name: str, activation: Tensor, hook: Any) -> None:
        self.held[name] = activation

    def _embedding(self, x: Tensor, hook: Any) -> None:
        self.note(0, widened(x)[None])

    def _mixer(self, index: int, behind: str, x: Tensor, hook: Any) -> None:
        self.held[behind] = x
        written = widened(x) - widened(self.held["residual"]).to(x.device)
        if self.graph.n_heads[index]:
            factor = self.graph.view.attention_factor(index)
            written = written - factor * widened(self.held["attention_out"]).to(x.device)
        self.note(self.graph.sender_index[f"L{index}MIX"], written[None])

    def _heads(self, index: int, writes: HeadWrites, z: Tensor, hook: Any) -> None:
        z = z_of(z, writes.w_o)
        self.note(self.graph.sender_index[f"L{index}H0"], writes.of(z, writes.token_scale(z)))

    def _mlp(self, index: int, written: Tensor, hook: Any) -> None:
        self.note(self.graph.sender_index[f"L{index}MLP"], widened(written)[None])


@dataclass
class CutStream(Stream):
    """A run in which each receiver reads the residual stream without the difference that its cut edges carry.

    `cut` says which edges are cut, or what share of each.
    """

    cut: Bool[Tensor, "receivers senders"] | Float[Tensor, "receivers senders"] = field(kw_only=True)

    def hooks(self) -> list[Hook]:
        """Return hooks that note what is written and edit what every receiver reads."""
        found = super().hooks()
        for index, layer in enumerate(self.layers):
            found += [(layer.names[INPUT_POINTS[what]], partial(self._edit, index, what)) for what in layer.reads]
            mlp = self.graph.mlps[index]
            found += [] if mlp is None else [(mlp.point, partial(self._edit_mlp, index))]
        return [*found, (self.layers[-1].names["residual_after"], self._edit_last)]

    def removed(self, first: Receiver, count: int) -> Float[Tensor, "receivers batch pos d_model"]:
        """Return what the cut edges of some receivers carry, from the first one on."""
        row, n = self.graph.receiver_index[self.graph.own(first)], self.graph.n_before(first)
        cut = self.cut[row : row + count, :n].to(self.written)
        return torch.einsum("rs,sbpd->rbpd", cut, self.written[:n])

    def _edit(self, index: int, what: Input, captured: Tensor, hook: Any) -> Tensor:
        layer = self.layers[index]
        count = layer.reads[what].weight.shape[0]
        removed = self.removed(Receiver(index, 0, what, what != "q"), count)
        change = layer.reads[what].change_each(widened(self.held["residual"]).to(removed.device), removed)
        heads = captured.reshape(*captured.shape[:2], -1, change.shape[-1])
        # Some models repeat keys and values, one per query head.
        change = change.repeat_interleave(heads.shape[2] // count, dim=2)
        return (widened(heads) + change.to(heads.device)).to(captured).reshape(captured.shape)

    def _edit_mlp(self, index: int, read: Tensor, hook: Any) -> Tensor:
        mlp = self.graph.mlps[index]
        assert mlp is not None
        x = mlp.stream({point: widened(self.held[point]) for point in mlp.reads})
        return mlp.changed(read, x, self.removed(Receiver(index, -1, "mlp"), 1)[0].to(x))

    def _edit_last(self, x: Tensor, hook: Any) -> Tensor:
        removed = self.removed(self.graph.receivers[-1], 1)[0]
        return (widened(x) - removed.to(x.device)).to(x)


@torch.no_grad()
def written_by(graph: Graph, layers: list[Layer], tokens: Int[Tensor, "batch pos"]) -> Tensor:
    """Run the model once and return what each sender writes, [senders, batch, pos, d_model]."""
    stream = Stream(graph, layers, None, _room(graph, layers, tokens))
    _run(graph, stream, tokens, slice(-1, None))
    return stream.written


@torch.no_grad()
def cut_logits(
    graph: Graph,
    layers: list[Layer],
    tokens: Int[Tensor, "batch pos"],
    then: Float[Tensor, "senders batch pos d_model"],
    kept: Bool[np.ndarray, "receivers senders"],
    scored: Positions,
) -> Float[Tensor, "batch scored d_vocab"]:
    """Return the logits of the clean prompts when only the kept edges carry what the run computes."""
    cut = torch.as_tensor(graph.possible & ~kept)
    stream = CutStream(graph, layers, then, _room(graph, layers, tokens), cut=cut.to(then.device))
    return _run(graph, stream, tokens, scored)


def _run(graph: Graph, stream: Stream, tokens: Tensor, scored: Positions) -> Tensor:
    with hooks_on(graph.view.model, graph.view.model.hook_dict, stream.hooks()):
        return logits_at(graph.view, tokens, scored)


def _room(graph: Graph, layers: list[Layer], tokens: Tensor) -> Tensor:
    weight = next(layer.writes.w_o for layer in layers if layer.writes is not None)
    return torch.empty(len(graph.senders), *tokens.shape, graph.view.d_model, dtype=weight.dtype, device=weight.device)
