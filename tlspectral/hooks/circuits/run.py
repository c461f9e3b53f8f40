"""Run a model with some of its edges kept: each receiver reads a residual stream of its own.

The model runs on the clean prompts. In its residual stream every sender writes what it computes in this run. A receiver
reads that stream without the difference between what a sender writes now and what it wrote on the counterfactual
prompt, summed over the edges that are cut. With all edges kept that is the clean run, with none the counterfactual one.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.edges.cutting import Cut
from tlspectral.models.attention.replay import Positions, logits_at
from tlspectral.models.attention.threads import Hook, holding, hooks_on
from tlspectral.models.attention.writes import HeadWrites, mixed, z_of


@dataclass
class Stream:
    """What every sender writes in one run, or the difference from what it wrote in an earlier run.

    Attributes:
        graph: of the model.
        written: what they have written so far, in the order of `Graph.senders`; less `then` where that is given.
        then: what they wrote before; None in the run that is to be compared with.
        cut: which edges are cut, or what share of each: a receiver reads the stream without the difference that these
            carry. None: nothing is changed.
        held: what a mixer reads and what stands beside it, by hook point.
    """

    graph: Graph
    written: Float[Tensor, "senders batch pos d_model"]
    then: Float[Tensor, "senders batch pos d_model"] | None = None
    cut: Bool[Tensor, "receivers senders"] | Float[Tensor, "receivers senders"] | None = None
    held: dict[str, Tensor] = field(default_factory=dict)

    def hooks(self) -> list[Hook]:
        """Return hooks that note what is written and edit what receivers read by cut edges."""
        view, place = self.graph.view, self.graph.sender_index
        found: list[Hook] = [(view.hook_names(0)["residual"], partial(self._note, 0))]
        for layer, writes in enumerate(self.graph.writes):
            names, mlp = view.hook_names(layer), self.graph.mlps[layer]
            if writes is not None:
                found.append((names["z"], partial(self._note_heads, place[f"L{layer}H0"], writes)))
            if self.graph.mixers[layer]:
                before = ("residual",) if writes is None else ("residual", "attention_out")
                found += holding(self.held, (names[point] for point in before))
                behind = "residual_after" if mlp is None else "middle"
                found.append((names[behind], partial(self._note_mixer, layer, behind)))
            if mlp is not None:
                found.append((names["mlp_out"], partial(self._note, place[f"L{layer}MLP"])))
        if self.cut is not None:
            found += [hook for kind, one in self.graph.readers for hook in one.hooks(partial(self._cuts, kind))]
        return found

    def _note(self, first: int, written: Float[Tensor, "*some batch pos d_model"], hook: Any = None) -> None:
        written = widened(written).to(self.written)
        written = written[None] if written.ndim == 3 else written
        place = slice(first, first + len(written))
        self.written[place] = written if self.then is None else written - self.then[place]

    def _note_heads(self, first: int, writes: HeadWrites, z: Tensor, hook: Any) -> None:
        z = z_of(z, writes.w_o)
        self._note(first, writes.of(z, writes.token_scale(z)))

    def _note_mixer(self, layer: int, behind: Literal["residual_after", "middle"], x: Tensor, hook: Any) -> None:
        view = self.graph.view
        captured = {**self.held, view.hook_names(layer)[behind]: x}
        self._note(self.graph.sender_index[f"L{layer}MIX"], mixed(view, layer, captured, widened, behind))

    def _cuts(self, kind: tuple[int, str]) -> list[Cut]:
        """Return what the cut edges of all receivers of a kind carry."""
        rows = self.graph.kinds[kind]
        n = self.graph.n_before(self.graph.receivers[rows.start])
        assert self.cut is not None
        removed = torch.einsum("rs,sbpd->rbpd", self.cut[rows, :n].to(self.written), self.written[:n])
        return [(place, slice(None), one) for place, one in enumerate(removed)]


@torch.no_grad()
def written_by(graph: Graph, tokens: Int[Tensor, "batch pos"]) -> Tensor:
    """Run the model once and return what each sender writes, [senders, batch, pos, d_model]."""
    stream = Stream(graph, _room(graph, tokens))
    run_with(stream, tokens, slice(-1, None))
    return stream.written


@torch.no_grad()
def cut_logits(
    graph: Graph,
    tokens: Int[Tensor, "batch pos"],
    then: Float[Tensor, "senders batch pos d_model"],
    kept: Bool[np.ndarray, "receivers senders"],
    scored: Positions,
) -> Float[Tensor, "batch scored d_vocab"]:
    """Return the logits of the clean prompts when only the kept edges carry what the run computes."""
    cut = torch.as_tensor(graph.possible & ~kept).to(then.device)
    return run_with(Stream(graph, _room(graph, tokens), then, cut), tokens, scored)


def run_with(stream: Stream, tokens: Tensor, scored: Positions) -> Float[Tensor, "batch scored d_vocab"]:
    """Return the logits of a run that notes and edits what a stream says."""
    model = stream.graph.view.model
    with hooks_on(model, model.hook_dict, stream.hooks()):
        return logits_at(stream.graph.view, tokens, scored)


def _room(graph: Graph, tokens: Tensor) -> Tensor:
    weight = next(writes.w_o for writes in graph.writes if writes is not None)
    return torch.empty(len(graph.senders), *tokens.shape, graph.view.d_model, dtype=weight.dtype, device=weight.device)
