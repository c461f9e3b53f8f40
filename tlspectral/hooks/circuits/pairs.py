"""`Pairs`: the clean and counterfactual prompts of a task on one model, and the value of any circuit on them.

In a circuit the model runs on the clean prompts, and each receiver reads a residual stream of its own: the stream of
this run, minus (write now - write on the counterfactual prompt) for each sender whose edge to the receiver is cut. With
all edges kept this is the clean run, with no edge kept the counterfactual run.
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
from tlspectral.models.running.long_prompts import refuse_long
from tlspectral.models.running.partial_runs import Positions, logits_at
from tlspectral.models.stream.writes import HeadWrites, mixed, require_stream, z_of
from tlspectral.tables.progress import bar
from tlspectral.tasks import Task
from tlspectral.tasks.task import task_of
from tlspectral.tasks.task_sequences import MetricValues, TaskSequences, metric_value_of, task_sequences

_Found = TypeVar("_Found")
Mask = Bool[np.ndarray, "receivers senders"]
"""A circuit: True for kept edges."""


@dataclass(frozen=True)
class Pairs:
    """The clean and counterfactual prompts of a task on one model.

    Attributes:
        graph: senders and receivers of the model.
        sequences: the clean prompts with their metric.
        other: the counterfactual prompts, tokenized, in the same order.
    """

    graph: Graph
    sequences: TaskSequences
    other: PackedTokens

    @property
    def view(self) -> AttentionView:
        """The model on which the pairs are run."""
        return self.graph.view

    @property
    def digests(self) -> list[str]:
        """List with a hash of the tokens of each pair without padding; it does not depend on which prompt is clean.

        Tables store these hashes, to recognise pairs on which edges were found.
        """
        both = zip(self.sequences.tokens, self.other.tokens, self.sequences.lengths.tolist(), strict=True)
        sides = (sorted(tokens[:n].contiguous().numpy().tobytes() for tokens in pair) for *pair, n in both)
        return [hashlib.sha256(b"".join(pair)).hexdigest()[:16] for pair in sides]

    @property
    def rows_at_once(self) -> int:
        """Number of prompts of one run, so that the stored writes of all senders fit into memory."""
        # Stored are the writes of two runs, and the streams of a window of receivers (`HeldWrites.first_layers`).
        of_run, of_layer = self.graph.numbers_held, max(Counter(end.layer for end in self.graph.receivers).values())
        row_bytes = (2 * of_run + max(of_run, of_layer * self.view.d_model)) * self.sequences.tokens.shape[1] * 4
        return max(1, min(self.sequences.rows_at_once(self.view), 3 * batch_on(self.view.device).held // row_bytes))

    def in_batches(self, run: Callable[[slice], _Found], *, backward: bool = False) -> Iterator[_Found]:
        """Yield the result of `run` for each batch of pairs; `run` gets the batch as a slice of pair numbers.

        `backward`: True if `run` makes a backward pass over all layers; batches are then small enough for its stored
        scores.
        """
        n, width = self.sequences.tokens.shape
        most = rows_of_scores(self.view, width, backward=True) if backward else n
        return in_batches(n, max(1, min(self.rows_at_once, most)), run)

    def differences(self, batch: slice) -> HeldWrites:
        """Run both prompts of a batch of pairs; return each sender's clean write minus its counterfactual write.

        `batch` is a slice of pairs.
        """
        clean = written_by(self.graph, self.sequences.tokens[batch])
        clean.less(written_by(self.graph, self.other.tokens[batch]))
        return clean

    def circuit_values(self, circuits: Sequence[Mask]) -> Float64[np.ndarray, "circuits pairs"]:
        """Run every circuit on every pair and return the metric of each pair in each circuit.

        A circuit is a mask [receivers, senders], True for kept edges. Each circuit takes one forward pass of the clean
        prompts, and all circuits together one of the counterfactual prompts. Several circuits run as one batch, which
        changes numbers only by rounding.
        """
        values, kept = MetricValues(self.sequences, len(circuits)), np.stack([*circuits])
        with bar(len(self.sequences.tokens) * len(circuits), "circuits", "run of a pair") as shown:

            def of_pairs(batch: slice) -> Tensor:
                """Return the values of a batch of pairs in all circuits."""
                tokens, predicted = self.sequences.tokens[batch], self.sequences.predicted_of(batch)
                then = written_by(self.graph, self.other.tokens[batch])

                def of_circuits(some: slice) -> Tensor:
                    """Return the values of the batch of pairs in some of the circuits, given as a slice."""
                    of_some = values.read(batch, cut_logits(self.graph, tokens, then, kept[some], predicted))
                    shown.update(len(of_some) * len(tokens))
                    return of_some

                # Each receiver copies the stream, so as many circuits run at once as such copies fit into caches.
                copies = batch_on(self.view.device).copied // (4 * tokens.numel() * self.view.d_model)
                at_once = max(1, min(self.rows_at_once // len(tokens), copies))
                return torch.cat([*in_batches(len(circuits), at_once, of_circuits)])

            for of_batch in self.in_batches(of_pairs):
                values.keep(of_batch)
        return values.result().numpy()

    def plain_values(self) -> Float64[np.ndarray, "sides pairs"]:
        """Run all prompts without any cut; return the metric of each pair: row 0 clean, row 1 counterfactual."""
        swapped = replace(self.sequences, tokens=self.other.tokens)
        return np.stack([metric_value_of(self.view, side).per_sequence for side in (self.sequences, swapped)])


def pairs_of(view: AttentionView, task: Task) -> Pairs:
    """Return the clean and counterfactual prompts of a task on a model, after checking that circuits can be run.

    A circuit is a set of edges that carry the clean prompt, while all others carry the counterfactual. Raises
    ValueError if `task` is not a task, has no counterfactual prompts, or has prompts that do not fit; EditNotHonored if
    a run without edges differs from the run of the counterfactual prompts; UnsupportedArchitecture if a layer or MLP
    cannot be read.
    """
    require_stream(view)
    chosen = task_of(task)
    if chosen.counterfactual is None:
        raise ValueError(f"{chosen.label} has no counterfactual prompts: give Task(..., counterfactual=)")
    sequences = task_sequences(view, chosen)
    assert sequences.counterfactual is not None
    refuse_long(sequences.tokens.shape[1], "edges are cut in", "")
    read_by_indexer = "by what no edge carries: give shorter prompts"
    require_every_key(map(view.raw, view.layers), sequences.tokens.shape[1], read_by_indexer)
    pairs = Pairs(Graph(view), sequences, sequences.counterfactual)
    sides = (stored_bytes(tokens[0]).tobytes() for tokens in (sequences.tokens, pairs.other.tokens))
    proved_in_state(view, ("both ends", *sides), partial(_require_both_ends, pairs))
    return pairs


@torch.no_grad()
def _require_both_ends(pairs: Pairs) -> None:
    """Raise EditNotHonored if the model cannot run circuits, tested on the first pair.

    With all edges kept, the logits must equal the clean run's; with no edge kept, the counterfactual run's.
    """
    # Every run has two rows: GPUs round a batch of another size differently, and deep models enlarge the difference.
    graph, tokens = pairs.graph, pairs.sequences.tokens[:1]
    sides = torch.cat([tokens, pairs.other.tokens[:1]])
    last, ends = slice(-1, None), np.stack([graph.possible, np.zeros_like(graph.possible)])
    then = written_by(graph, sides).each(lambda held: held[..., 1:, :, :])
    for plain, in_circuit, what in zip(
        logits_at(graph.view, sides, last),
        cut_logits(graph, tokens, then, ends, last, whole=True),
        (
            "all edges kept is not the run of the clean prompt",
            "no edge kept is not the run of the counterfactual prompt",
        ),
        strict=True,
    ):
        require_close(
            (in_circuit - plain).abs().max(),
            plain.abs().max(),
            plain.dtype,
            "stream",
            f"a circuit with {what}; its logits differ",
            "edges of this model are not defined; look for hooks that edit what is written or read",
            EditNotHonored,
        )


@dataclass
class Stream:
    """Hooks that record the writes of all senders in a run and edit the streams that receivers read.

    Attributes:
        graph: senders and receivers.
        written: writes of this run so far, minus the writes of `then` if that is given.
        then: writes of all senders in an earlier run, which cut edges carry.
        cut: share of each edge that is cut, by circuit (1: cut); None changes nothing. The batch then holds one copy of
            the prompts for each circuit.
        acting: True for receivers that are edited; None: all.
        held: activations around mixers, by hook name.
        window: sums over cut edges for the receivers of the current layers.
    """

    graph: Graph
    written: HeldWrites
    then: HeldWrites | None = None
    cut: Float[Tensor, "circuits receivers senders"] | None = None
    acting: Bool[np.ndarray, "receivers"] | None = None
    held: dict[str, Tensor] = field(default_factory=dict)
    window: Window | None = None

    def hooks(self) -> list[Hook]:
        """Return the `fwd_hooks` list that stores each sender's write in `written` and edits the streams of receivers.

        Without `cut` nothing is edited.
        """
        view, place = self.graph.view, self.graph.sender_index
        hooks: list[Hook] = [(view.hook_names(0)["residual"], partial(self._note, 0))]
        for layer, writes in enumerate(self.graph.writes):
            names, mlp = view.hook_names(layer), self.graph.mlps[layer]
            if writes is not None:
                hooks.append((names["z"], partial(self._note_heads, layer, writes)))
            if self.graph.mixers[layer]:
                before = ("residual",) if writes is None else ("residual", "attention_out")
                hooks += holding(self.held, (names[point] for point in before))
                behind = "residual_after" if mlp is None else "middle"
                hooks.append((names[behind], partial(self._note_mixer, layer, behind)))
            if mlp is not None:
                hooks.append((names["mlp_out"], partial(self._note, place[f"L{layer}MLP"])))
        if self.cut is not None:
            acting = ((kind, read) for kind, read in self.graph.receiver_inputs if self._places(kind))
            hooks += [hook for kind, read in acting for hook in read.hooks(partial(self._cuts, kind))]
        return hooks

    def _note(self, sender: int, written: Float[Tensor, "batch pos d_model"], hook: Any = None) -> None:
        """Store the write of the sender with this index in `written`. `hook` is not used."""
        self.written.note(sender, widened(written), self.then)

    def _note_heads(self, layer: int, writes: HeadWrites, z: Tensor, hook: Any) -> None:
        """Store the z (output before W_O) of the heads of a layer in `written`.

        `writes` are the maps from z to the stream; `hook` is not used.
        """
        self.written.note_heads(layer, z_of(z, writes.w_o), self.then)

    def _note_mixer(self, layer: int, behind: Literal["residual_after", "middle"], x: Tensor, hook: Any) -> None:
        """Store the write of a layer's mixer in `written`: the stream `x` behind it, minus the stream's other terms.

        `behind` is the short name of the hook point of `x`; `hook` is not used.
        """
        view = self.graph.view
        captured = {**self.held, view.hook_names(layer)[behind]: x}
        self._note(self.graph.sender_index[f"L{layer}MIX"], mixed(view, layer, captured, widened, behind))

    def _places(self, kind: tuple[int, str]) -> list[int]:
        """Return the indices of the receivers of a kind (layer, input) that are edited."""
        return self._edited(self.graph.kinds[kind])

    def _edited(self, places: slice) -> list[int]:
        """Return the indices of edited receivers within the slice `places`, as a list."""
        every = range(len(self.graph.receivers))[places]
        return [place for place in every if self.acting is None or self.acting[place]]

    def _cuts(self, kind: tuple[int, str]) -> list[Cut]:
        """Return a list with one `Cut`: what to subtract from the streams of receivers of a kind, (layer, input)."""
        places, first = self._places(kind), self.graph.kinds[kind].start
        if self.window is None or places[0] not in self.window.receivers:
            assert self.cut is not None
            self.window = None  # frees its memory before the next window is made
            of_layer = next(places for (layer, _), places in self.graph.kinds.items() if layer == kind[0])
            behind = self._edited(slice(of_layer.start, None))
            self.window = Window(self.written, self.written.first_layers(behind), self.cut)
        return [Cut([place - first for place in places], slice(None), self.window.carried(places))]


@torch.no_grad()
def written_by(graph: Graph, tokens: Int[Tensor, "batch pos"]) -> HeldWrites:
    """Run the model once on these token ids and return the writes of all senders (heads, MLPs, mixers, embedding).

    `graph` has the model and its senders.
    """
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
    """Run the clean prompts in each circuit, and return the logits at the positions `predicted`.

    Edges that a circuit does not keep carry the sender's write on the counterfactual prompt.

    Args:
        graph: senders and receivers.
        tokens: token ids of the clean prompts.
        then: writes on the counterfactual prompts, which cut edges carry.
        kept: True for kept edges, for each circuit.
        predicted: positions of the logits.
        whole: True edits all receivers. Default: only receivers with a path to the logits, which gives the same logits.
    """
    cut = graph.possible & ~kept
    acting = np.asarray(cut.any(axis=(0, 2)))
    if not whole:
        acting &= np.any([graph.useful(circuit, by_norms=True) for circuit in kept], axis=0)
    tokens = tokens.repeat(len(kept), 1)
    predicted = predicted if isinstance(predicted, slice) else predicted.repeat(len(kept), 1)
    stream = Stream(graph, HeldWrites(graph), then, torch.as_tensor(cut).to(then.whole[0]), acting)
    return run_with(stream, tokens, predicted).unflatten(0, (len(kept), -1))


def run_with(stream: Stream, tokens: Tensor, predicted: Positions) -> Float[Tensor, "batch predicted d_vocab"]:
    """Run the model with the hooks of a `Stream` and return the logits at the positions `predicted`.

    `tokens` are the token ids; with cut edges one copy of the prompts for each circuit. The writes are then in
    `stream.written`.
    """
    view = stream.graph.view
    with view.hooks_on(stream.hooks()):
        return logits_at(view, tokens, predicted)
