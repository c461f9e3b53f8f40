"""A task of pairs on one model: what is written on either side, and the value of any circuit.

A circuit is a run with some edges kept, in which each receiver reads a residual stream of its own. The model runs on
the clean prompts, and in its residual stream every sender writes what it computes in this run. A receiver reads that
stream without the difference between what a sender writes now and what it wrote on the counterfactual prompt, summed
over the edges that are cut. With all edges kept that is the clean run, with none the counterfactual one.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.errors import EditNotHonored
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.held_writes import HeldWrites, Window
from tlspectral.hooks.edges.cut import Cut
from tlspectral.hooks.probe import proved_in_state
from tlspectral.models.attention.tolerances import require_close
from tlspectral.models.hooking.placing import Hook, holding
from tlspectral.models.reading.digests import stored_bytes
from tlspectral.models.reading.layer import require_every_key
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens, batch_on, in_batches, rows_of_scores
from tlspectral.models.running.partial_runs import Positions, logits_at
from tlspectral.models.stream.writes import HeadWrites, mixed, require_stream, z_of
from tlspectral.tables.progress import bar
from tlspectral.tasks import Task
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import MetricValues, TaskSequences, metric_value_of, task_sequences

_Found = TypeVar("_Found")
Mask = Bool[np.ndarray, "receivers senders"]


@dataclass(frozen=True)
class Pairs:
    """The clean and counterfactual prompts of a task on one model."""

    graph: Graph
    sequences: TaskSequences
    other: PackedTokens

    @property
    def view(self) -> AttentionView:
        """The model."""
        return self.graph.view

    @property
    def digests(self) -> list[str]:
        """A hash of the real tokens of each pair, the same with its sides exchanged.

        Tables keep the hashes of the pairs on which they were made.
        """
        both = zip(self.sequences.tokens, self.other.tokens, self.sequences.lengths.tolist(), strict=True)
        sides = (sorted(one[:n].contiguous().numpy().tobytes() for one in pair) for *pair, n in both)
        return [hashlib.sha256(b"".join(pair)).hexdigest()[:16] for pair in sides]

    @property
    def rows_at_once(self) -> int:
        """Rows of one run, which bounds what is held of their writes."""
        # What two runs write and the streams of a window of receivers, see `HeldWrites.first_layers`.
        of_run, of_layer = self.graph.numbers_held, max(Counter(one.layer for one in self.graph.receivers).values())
        each = (2 * of_run + max(of_run, of_layer * self.view.d_model)) * self.sequences.tokens.shape[1] * 4
        return max(1, min(self.sequences.rows_at_once(self.view), 3 * batch_on(self.view.device).held // each))

    def in_batches(self, run: Callable[[slice], _Found], *, backward: bool = False) -> Iterator[_Found]:
        """Yield what `run` returns for batches of `rows_at_once` pairs, see `batches.in_batches`.

        With `backward`, of a run with a backward pass over all layers, they are of as many as its scores have room for.
        """
        n, width = self.sequences.tokens.shape
        most = rows_of_scores(self.view, width, backward=True) if backward else n
        return in_batches(n, max(1, min(self.rows_at_once, most)), run)

    def differences(self, batch: slice) -> HeldWrites:
        """Return what each sender writes on the clean prompts less what it writes on the counterfactual ones."""
        clean = written_by(self.graph, self.sequences.tokens[batch])
        clean.less(written_by(self.graph, self.other.tokens[batch]))
        return clean

    def circuit_values(self, circuits: Sequence[Mask]) -> Float64[np.ndarray, "circuits pairs"]:
        """Return the value of each pair in each circuit, a mask of the edges that are kept.

        A circuit takes one forward pass of the clean prompts, all circuits together one of the counterfactual ones. As
        many circuits as memory allows are stacked on the batch axis, which changes numbers by rounding only.
        """
        values, kept = MetricValues(self.sequences, len(circuits)), np.stack([*circuits])
        with bar(len(self.sequences.tokens) * len(circuits), "circuits", "run of a pair") as shown:

            def of_pairs(batch: slice) -> Tensor:
                tokens, predicted = self.sequences.tokens[batch], self.sequences.predicted_of(batch)
                then = written_by(self.graph, self.other.tokens[batch])

                def of_circuits(some: slice) -> Tensor:
                    found = values.read(batch, cut_logits(self.graph, tokens, then, kept[some], predicted))
                    shown.update(len(found) * len(tokens))
                    return found

                # Receivers take copies of the stream, one after the other where caches hold no more.
                copies = batch_on(self.view.device).copied // (4 * tokens.numel() * self.view.d_model)
                at_once = max(1, min(self.rows_at_once // len(tokens), copies))
                return torch.cat([*in_batches(len(circuits), at_once, of_circuits)])

            for found in self.in_batches(of_pairs):
                values.keep(found)
        return values.result().numpy()

    def plain_values(self) -> Float64[np.ndarray, "sides pairs"]:
        """Return the metric of each pair in a plain run of the clean and of the counterfactual prompts."""
        swapped = replace(self.sequences, tokens=self.other.tokens)
        return np.stack([metric_value_of(self.view, one).per_sequence for one in (self.sequences, swapped)])


def pairs_of(view: AttentionView, task: Task) -> Pairs:
    """Return the pairs of a task on a model.

    Raises ValueError for no task, for one without counterfactual prompts and for prompts that do not fit;
    EditNotHonored where a run with no edge kept is not the run of the counterfactual prompts; UnsupportedArchitecture
    for a layer or MLP that cannot be read.
    """
    require_stream(view)
    chosen = task_of(task)
    if chosen.counterfactual is None:
        raise ValueError(f"{chosen.label} has no counterfactual prompts: give Task(..., counterfactual=)")
    sequences = task_sequences(view, chosen)
    assert sequences.counterfactual is not None
    read_by_indexer = "by what no edge carries: give shorter prompts"
    require_every_key(map(view.raw, view.layers), sequences.tokens.shape[1], read_by_indexer)
    pairs = Pairs(Graph(view), sequences, sequences.counterfactual)
    sides = (stored_bytes(one[0]).tobytes() for one in (sequences.tokens, pairs.other.tokens))
    proved_in_state(view, ("both ends", *sides), partial(_require_both_ends, pairs))
    return pairs


@torch.no_grad()
def _require_both_ends(pairs: Pairs) -> None:
    """Refuse a model in which all edges are not the clean run of the first pair, or none not the counterfactual one.

    Every run has two rows, since a card rounds a batch of another size otherwise, and a deep model enlarges that.
    """
    graph, tokens = pairs.graph, pairs.sequences.tokens[:1]
    sides = torch.cat([tokens, pairs.other.tokens[:1]])
    last, ends = slice(-1, None), np.stack([graph.possible, np.zeros_like(graph.possible)])
    then = written_by(graph, sides).each(lambda held: held[..., 1:, :, :])
    for plain, found, what in zip(
        logits_at(graph.view, sides, last),
        cut_logits(graph, tokens, then, ends, last, whole=True),
        (
            "all edges kept is not the run of the clean prompt",
            "no edge kept is not the run of the counterfactual prompt",
        ),
        strict=True,
    ):
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

    `cut` says which edges are cut in each circuit, or what share of each: a receiver reads the stream without the
    difference that these carry. None: nothing is changed. The batch is one copy of the prompts for each circuit. Only
    receivers that are `acting` are edited; None: all. `held` is what a mixer reads and what stands beside it, by hook
    point. `window` is what cut edges carry to the receivers of some layers.
    """

    graph: Graph
    written: HeldWrites
    then: HeldWrites | None = None
    cut: Float[Tensor, "circuits receivers senders"] | None = None
    acting: Bool[np.ndarray, "receivers"] | None = None
    held: dict[str, Tensor] = field(default_factory=dict)
    window: Window | None = None

    def hooks(self) -> list[Hook]:
        """Return hooks that note what is written and edit what receivers read by cut edges."""
        view, place = self.graph.view, self.graph.sender_index
        found: list[Hook] = [(view.hook_names(0)["residual"], partial(self._note, 0))]
        for layer, writes in enumerate(self.graph.writes):
            names, mlp = view.hook_names(layer), self.graph.mlps[layer]
            if writes is not None:
                found.append((names["z"], partial(self._note_heads, layer, writes)))
            if self.graph.mixers[layer]:
                before = ("residual",) if writes is None else ("residual", "attention_out")
                found += holding(self.held, (names[point] for point in before))
                behind = "residual_after" if mlp is None else "middle"
                found.append((names[behind], partial(self._note_mixer, layer, behind)))
            if mlp is not None:
                found.append((names["mlp_out"], partial(self._note, place[f"L{layer}MLP"])))
        if self.cut is not None:
            acting = ((kind, one) for kind, one in self.graph.receiver_inputs if self._places(kind))
            found += [hook for kind, one in acting for hook in one.hooks(partial(self._cuts, kind))]
        return found

    def _note(self, sender: int, written: Float[Tensor, "batch pos d_model"], hook: Any = None) -> None:
        self.written.note(sender, widened(written), self.then)

    def _note_heads(self, layer: int, writes: HeadWrites, z: Tensor, hook: Any) -> None:
        self.written.note_heads(layer, z_of(z, writes.w_o), self.then)

    def _note_mixer(self, layer: int, behind: Literal["residual_after", "middle"], x: Tensor, hook: Any) -> None:
        view = self.graph.view
        captured = {**self.held, view.hook_names(layer)[behind]: x}
        self._note(self.graph.sender_index[f"L{layer}MIX"], mixed(view, layer, captured, widened, behind))

    def _places(self, kind: tuple[int, str]) -> list[int]:
        """Return the receivers of a kind that are edited."""
        return self._edited(self.graph.kinds[kind])

    def _edited(self, places: slice) -> list[int]:
        every = range(len(self.graph.receivers))[places]
        return [place for place in every if self.acting is None or self.acting[place]]

    def _cuts(self, kind: tuple[int, str]) -> list[Cut]:
        """Return what is cut from the receivers of a kind."""
        places, first = self._places(kind), self.graph.kinds[kind].start
        if self.window is None or places[0] not in self.window.receivers:
            assert self.cut is not None
            self.window = None  # its memory is free before the next one takes some
            of_layer = next(places for (layer, _), places in self.graph.kinds.items() if layer == kind[0])
            behind = self._edited(slice(of_layer.start, None))
            self.window = Window(self.written, self.written.first_layers(behind), self.cut)
        return [Cut([place - first for place in places], slice(None), self.window.carried(places))]


@torch.no_grad()
def written_by(graph: Graph, tokens: Int[Tensor, "batch pos"]) -> HeldWrites:
    """Run the model once and return what each sender writes."""
    stream = Stream(graph, HeldWrites(graph))
    run_with(stream, tokens, slice(-1, None))
    return stream.written


@torch.no_grad()
def cut_logits(
    graph: Graph,
    tokens: Int[Tensor, "batch pos"],
    then: HeldWrites,
    kept: Bool[np.ndarray, "circuits receivers senders"],
    predicted: Positions,
    *,
    whole: bool = False,
) -> Float[Tensor, "circuits batch predicted d_vocab"]:
    """Return the logits of the clean prompts when only the edges that a circuit keeps carry what the run computes.

    Receivers from which no path leads to the logits are left as they are, since all that they change is cut behind
    them. With `whole` all are edited.
    """
    cut = graph.possible & ~kept
    acting = np.asarray(cut.any(axis=(0, 2)))
    if not whole:
        acting &= np.any([graph.useful(one, by_norms=True) for one in kept], axis=0)
    tokens = tokens.repeat(len(kept), 1)
    predicted = predicted if isinstance(predicted, slice) else predicted.repeat(len(kept), 1)
    stream = Stream(graph, HeldWrites(graph), then, torch.as_tensor(cut).to(then.whole[0]), acting)
    return run_with(stream, tokens, predicted).unflatten(0, (len(kept), -1))


def run_with(stream: Stream, tokens: Tensor, predicted: Positions) -> Float[Tensor, "batch predicted d_vocab"]:
    """Return the logits of a run that notes and edits what a stream says."""
    view = stream.graph.view
    with view.hooks_on(stream.hooks()):
        return logits_at(view, tokens, predicted)
