"""A task of pairs on one model: what is written on either side, and the score of any circuit.

A circuit is a run with some edges kept, in which each receiver reads a residual stream of its own. The model runs on
the clean prompts, and in its residual stream every sender writes what it computes in this run. A receiver reads that
stream without the difference between what a sender writes now and what it wrote on the counterfactual prompt, summed
over the edges that are cut. With all edges kept that is the clean run, with none the counterfactual one.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.edges.cut import Cut
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.hooking.hooks_on_model import Hook, holding
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.layer import require_every_key
from tlspectral.models.reading.view import AttentionView, require_stream
from tlspectral.models.running.padding import PackedTokens
from tlspectral.models.running.partial_runs import Positions, logits_at
from tlspectral.models.stream.writes import HeadWrites, mixed, z_of
from tlspectral.tables.progress import bar
from tlspectral.tasks import Task
from tlspectral.tasks.scoring import ScoredSequences, Scores, score_of, scored_sequences
from tlspectral.tasks.task import task_of

_MOST_BYTES = 2**29  # of what all senders write in one batch, of which a run holds up to three copies

Mask = Bool[np.ndarray, "receivers senders"]


@dataclass(frozen=True)
class Pairs:
    """The clean and counterfactual prompts of a task on one model."""

    graph: Graph
    sequences: ScoredSequences
    other: PackedTokens

    @property
    def view(self) -> AttentionView:
        """The model."""
        return self.graph.view

    @property
    def digests(self) -> list[str]:
        """A hash of the real tokens of each pair, the same with its sides exchanged.

        Tables keep those of the pairs on which they were made.
        """
        both = zip(self.sequences.tokens, self.other.tokens, self.sequences.lengths.tolist(), strict=True)
        sides = (sorted(one[:n].contiguous().numpy().tobytes() for one in pair) for *pair, n in both)
        return [hashlib.sha256(b"".join(pair)).hexdigest()[:16] for pair in sides]

    def batches(self) -> Iterator[slice]:
        """Yield the pairs in batches that bound what is held of their writes."""
        each = len(self.graph.senders) * self.sequences.tokens.shape[1] * self.view.d_model * 4
        rows = max(1, min(self.sequences.rows_at_once(self.view), _MOST_BYTES // each))
        for start in range(0, len(self.sequences.tokens), rows):
            yield slice(start, min(start + rows, len(self.sequences.tokens)))

    def differences(self, batch: slice) -> Float[Tensor, "senders batch pos d_model"]:
        """Return what each sender writes on the clean prompts less what it writes on the counterfactual ones."""
        clean = written_by(self.graph, self.sequences.tokens[batch])
        return clean.sub_(written_by(self.graph, self.other.tokens[batch]))

    def scores(self, circuits: Sequence[Mask]) -> Float64[np.ndarray, "circuits pairs"]:
        """Return the score of each pair in each circuit, a mask of the edges that are kept.

        A circuit takes one forward pass of the clean prompts, all circuits together one of the counterfactual ones.
        """
        results = [Scores(self.sequences, 1) for _ in circuits]
        batches = list(self.batches())
        with bar(len(batches) * len(circuits), "circuits", "run") as shown:
            for batch in batches:
                then = written_by(self.graph, self.other.tokens[batch])
                for circuit, result in zip(circuits, results, strict=True):
                    scored = self.sequences.scored_of(batch)
                    tokens = self.sequences.tokens[batch]
                    result.add(batch, cut_logits(self.graph, tokens, then, circuit, scored))
                    shown.update(1)
        return np.stack([result.result()[0].numpy() for result in results])

    def plain_scores(self) -> Float64[np.ndarray, "sides pairs"]:
        """Return the metric of each pair in a plain run of the clean and of the counterfactual prompts."""
        swapped = replace(self.sequences, tokens=self.other.tokens)
        return np.stack([score_of(self.view, one).per_sequence for one in (self.sequences, swapped)])


def pairs_of(model: Any, task: Task) -> Pairs:
    """Return the pairs of a task on a model.

    Raises ValueError for no task, or one without counterfactual prompts, EditNotHonored where a run with no edge kept
    is not that of the counterfactual prompts, and as `scored_sequences`, `AttentionView.raw` and `mlp_reads`.
    """
    view = attention_view(model)
    require_stream(view)
    chosen = task_of(task)
    if chosen.counterfactual is None:
        raise ValueError(f"{chosen.label} has no counterfactual prompts: give Task(..., counterfactual=)")
    sequences = scored_sequences(view, chosen)
    assert sequences.counterfactual is not None
    read_by_indexer = "by what no edge carries: give shorter prompts"
    require_every_key(map(view.raw, view.layers), sequences.tokens.shape[1], read_by_indexer)
    pairs = Pairs(Graph(view), sequences, sequences.counterfactual)
    _require_both_ends(pairs)
    return pairs


@torch.no_grad()
def _require_both_ends(pairs: Pairs) -> None:
    """Refuse a model in which all edges are not the clean run of the first pair, or none not the counterfactual one."""
    graph, tokens, other = pairs.graph, pairs.sequences.tokens[:1], pairs.other.tokens[:1]
    then, last = written_by(graph, other), slice(-1, None)
    for kept, expected, what in (
        (graph.possible, tokens, "all edges kept is not the run of the clean prompt"),
        (np.zeros_like(graph.possible), other, "no edge kept is not the run of the counterfactual prompt"),
    ):
        plain = logits_at(graph.view, expected, last)
        found = cut_logits(graph, tokens, then, kept, last)
        require_close(
            (found - plain).abs().max(),
            plain.abs().max(),
            plain.dtype,
            "stream",
            f"a circuit with {what}; its logits differ",
            "edges of this model are not defined; look for hooks that edit what is written or read",
            EditNotHonored,
        )


@dataclass
class Stream:
    """What every sender has written in a run, less what it wrote in an earlier run where that is given as `then`.

    `cut` says which edges are cut, or what share of each: a receiver reads the stream without the difference that these
    carry. None: nothing is changed. `held` is what a mixer reads and what stands beside it, by hook point.
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
    view = stream.graph.view
    with view.hooks_on(stream.hooks()):
        return logits_at(view, tokens, scored)


def _room(graph: Graph, tokens: Tensor) -> Tensor:
    weight = next(writes.w_o for writes in graph.writes if writes is not None)
    return torch.empty(len(graph.senders), *tokens.shape, graph.view.d_model, dtype=weight.dtype, device=weight.device)
