"""First-order estimates of the effect of every edge: edge attribution patching, with or without integrated gradients.

EAP is Syed et al. 2023 ("Attribution Patching Outperforms Automated Circuit Discovery"). EAP-IG is Hanna et al. 2024
("Have Faith in Faithfulness"): its gradients are a mean over inputs between the two prompts. EAP-QK computes the
softmax of attention again for edges into queries and keys (`circuits.query_key_estimates`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.held_writes import HeldWrites
from tlspectral.hooks.circuits.pairs import Pairs
from tlspectral.hooks.circuits.query_key_estimates import (
    attention_effects,
    attention_of,
    gradient_of_attention,
    taken_anew,
)
from tlspectral.hooks.edges.measuring import ReceiverLayer
from tlspectral.hooks.edges.senders import READ_POINTS
from tlspectral.models.hooking.placing import Hook, holding
from tlspectral.models.running.partial_runs import logits_at, require_gradients
from tlspectral.models.running.passes import capture_until
from tlspectral.models.stream.writes import Input, LayerReads
from tlspectral.tables.progress import bar

Method = Literal["EAP", "EAP-IG", "EAP-QK"]
"""Estimates of edges.

- "EAP": gradients at the clean run.
- "EAP-IG": mean of the gradients at five inputs between the counterfactual and the clean prompt.
- "EAP-QK": as "EAP", and for edges into queries and keys the whole change of the attention.
"""
STEPS = {"EAP": (1.0,), "EAP-IG": (0.2, 0.4, 0.6, 0.8, 1.0), "EAP-QK": (1.0,)}
"""From method to the inputs at which gradients are taken, as shares of the clean embedding.

The rest of the input is the counterfactual embedding.
"""


_MOST_BYTES = 2**30  # memory of the terms of all units; beyond it, pairs are joined into blocks
_LEAST_BLOCKS = 32  # number of blocks even if they take more memory


@dataclass(frozen=True)
class Estimates:
    """First-order estimates of the effects of all edges (from a sender's write to a receiver's input).

    The estimate of an edge is the sum of its terms over units. The term of a unit is its share of the mean over pairs.

    Attributes:
        terms: the term of each unit, for each position at which edges are cut, in units of the metric.
        sizes: number of pairs in each unit.
        units: "pairs" (a unit is a distinct pair), "blocks" (a block of pairs, if terms would take more than 1 GiB) or
            "all" (all pairs are one unit, for a metric whose value for one prompt depends on other prompts).
    """

    terms: Float64[np.ndarray, "units positions receivers senders"]
    sizes: Int[np.ndarray, "units"]
    units: Literal["pairs", "blocks", "all"]


@torch.no_grad()
def edge_estimates(pairs: Pairs, method: Method, at: Sequence[Int[Tensor, "pairs"]] = ()) -> Estimates:
    """Return estimates of metric(edge cut to its counterfactual) - metric(clean) for every edge, by units of pairs.

    The estimate is the gradient of the metric in the receiver's stream, times (counterfactual - clean write of the
    sender). With "EAP-QK", an edge into queries or keys has the gradient in the attention times the attention's change.

    Args:
        pairs: the clean and counterfactual prompts on one model.
        method: how gradients are taken: "EAP" at the clean run, "EAP-IG" as a mean over five inputs between the two
            prompts, "EAP-QK" with the softmax of attention computed again.
        at: positions at which edges are cut, each alone; one entry holds a position for each pair. Default: none, all
            positions at once.

    Raises:
        ValueError: gradients are off (`torch.inference_mode`), now or when the model was loaded; with "EAP-QK" also
            prompts longer than the layer's score scale allows.
        EditNotHonored, ScoreMismatch, UnsupportedArchitecture: with "EAP-QK", a layer's attention cannot be recomputed.
    """
    # One backward pass gives the gradients at queries, keys and values of all heads, at the inputs of MLPs and behind
    # the last layer. Each is carried to the receiver's own stream by its weights and the Jacobian of its norm.
    require_gradients(pairs.view, "screen='gradient'")
    anew = taken_anew(pairs.view) if method == "EAP-QK" else []
    graph, sequences, other = pairs.graph, pairs.sequences, pairs.other
    masks = [places[:, None] == torch.arange(sequences.tokens.shape[1]) for places in at] or [sequences.real]
    steps, n = STEPS[method], len(sequences.tokens)
    kind, unit = _units(pairs, len(masks) * graph.possible.size)
    terms = torch.zeros(int(unit.max()) + 1, len(masks), *graph.possible.shape, dtype=torch.float64)
    of_logits: dict[float, Tensor] = {}
    with bar(n * len(steps), method, "run of a pair") as shown:

        def estimates(batch: slice) -> tuple[Tensor, Tensor]:
            """Return the numbers of the units (pairs, or blocks of pairs) in a batch, and their terms from this batch.

            `batch` is a slice of pairs. A term is a unit's share of an edge's estimate.
            """
            of_units, place_of = unit[batch].unique(return_inverse=True)
            of_batch = terms.new_zeros(len(of_units), *terms.shape[1:])
            differences = pairs.differences(batch)
            embedding = differences.whole[0]
            # Before the first token that differs, clean and counterfactual writes are equal: no edge carries anything.
            first = int((sequences.tokens[batch] != other.tokens[batch]).any(0).float().argmax())
            late = differences.each(lambda held: held[..., first:, :])
            chosen = torch.stack([places[batch] for places in at], dim=1) - first if at else None
            if chosen is not None:
                removed = late.each(partial(_at, chosen))
            else:
                counted = sequences.real[batch, first:, None].to(embedding)
                removed = late if counted.all() else late.each(lambda held: held * counted)
            for share in steps:
                reading = _Reading(pairs, (1.0 - share) * embedding, anew)
                logit_gradient = None
                if not sequences.by_rows and batch.stop - batch.start < n:  # the metric gets all prompts at once
                    # The gradient in the logits needs a run of all pairs, and is then kept for the other batches.
                    if share not in of_logits:
                        of_logits[share] = _logit_gradients(pairs, share)
                    logit_gradient = of_logits[share][batch]
                reading.run(batch, logit_gradient)
                for receivers, gradients in reading.of_windows(late):
                    gradients = gradients if chosen is None else _at(chosen, gradients)
                    products = _products(graph, receivers, gradients, removed) / (n * len(steps))
                    of_pairs = products.unflatten(0, (len(embedding), -1))
                    zero = of_pairs.new_zeros(len(of_units), *of_pairs.shape[1:])
                    of_batch[:, :, receivers] -= zero.index_add_(0, place_of, of_pairs)
                for rows, attention, gradient in reading.of_patterns():
                    before = graph.n_before(graph.receivers[rows.start])
                    for place, mask in enumerate(masks):
                        counted = mask[batch, first:]
                        of_pairs = attention_effects(attention, late, before, counted, gradient, rows.stop - rows.start)
                        of_pairs = of_pairs.double().cpu() / (n * len(steps))
                        of_batch[:, place, rows, :before].index_add_(0, place_of, of_pairs)
                shown.update(batch.stop - batch.start)
            return of_units, of_batch

        for of_units, of_batch in pairs.in_batches(estimates, backward=True):
            terms.index_add_(0, of_units, of_batch)
    return Estimates(terms.numpy(), np.bincount(unit.numpy()), kind)


def _at(positions: Int[Tensor, "batch chosen"], held: Float[Tensor, "*some batch late d"]) -> Tensor:
    """Return the vectors of `held` at some positions of each row of the batch, as [*some, batch * chosen, 1, d].

    `positions` count from the first position in `held`; a negative one gives a vector of 0.
    """
    index = positions.clamp(min=0)[..., None].to(held.device)
    gathered = held.gather(-2, index.expand(*held.shape[:-3], *index.shape[:2], held.shape[-1]))
    return (gathered * (positions >= 0)[..., None].to(gathered)).flatten(-3, -2).unsqueeze(-2)


def _products(
    graph: Graph, receivers: Sequence[int], gradients: Float[Tensor, "receivers rows pos d"], removed: HeldWrites
) -> Float64[Tensor, "rows receivers senders"]:
    """Return the inner product of each receiver's gradient with each sender's write, summed over positions.

    `graph` has senders and receivers, `receivers` are indices into `Graph.receivers`, `gradients` the gradients in
    their streams, `removed` the writes of the senders, for equal rows and positions. Where no edge leads from sender to
    receiver, the product is 0.
    """
    n_before = [graph.n_before(graph.receivers[place]) for place in receivers]
    products = torch.zeros(gradients.shape[1], len(receivers), len(graph.senders), dtype=torch.float64)
    for senders, rows, tokens, written in removed.pieces(slice(0, n_before[-1])):
        reading = slice(bisect_right(n_before, senders.start), None)
        of_rows = gradients[reading, rows, tokens].flatten(2).transpose(0, 1)
        products[rows, reading, senders] += torch.bmm(of_rows, written.flatten(2).permute(1, 2, 0)).double().cpu()
    return products * torch.as_tensor(graph.possible[receivers])


def _units(pairs: Pairs, numbers: int) -> tuple[Literal["pairs", "blocks", "all"], Int[Tensor, "pairs"]]:
    """Return the kind of the units ("pairs", "blocks" or "all") and the number of the unit of each pair.

    Estimates are kept separately for each unit: a distinct pair, a block of pairs, or all pairs. `numbers` is how many
    numbers the estimates of one unit take; it decides whether pairs are joined into blocks.
    """
    sequences, n, distinct = pairs.sequences, len(pairs.sequences.tokens), pairs.sequences.distinct

    def logits() -> Tensor:
        """Return the logits of all clean prompts."""

        def logits_of(batch: slice) -> Tensor:
            return logits_at(pairs.view, sequences.tokens[batch], sequences.predicted_of(batch)).float()

        return torch.cat([*pairs.in_batches(logits_of)])

    if not sequences.of_each_row(logits):
        return "all", torch.zeros(n, dtype=torch.int64)
    unit = torch.arange(n) if distinct is None else torch.as_tensor(distinct)
    most = max(_LEAST_BLOCKS, _MOST_BYTES // (8 * numbers))
    if int(unit.max()) < most:
        return "pairs", unit
    return "blocks", unit % most


def _logit_gradients(pairs: Pairs, share: float) -> Float[Tensor, "pairs predicted d_vocab"]:
    """Return the gradient of the metric in the logits of all pairs, for a metric that gets all prompts at once.

    `share` is the share of the clean embedding in the input of the run; the rest is the counterfactual embedding.
    """
    view, point = pairs.view, pairs.view.hook_names(0)["residual"]

    def logits(batch: slice) -> Tensor:
        """Return the logits of a batch for an input between counterfactual and clean embedding."""
        clean, other = (
            widened(capture_until(view, side.tokens[batch], [point], last=point)[point])
            for side in (pairs.sequences, pairs.other)
        )
        return _Reading(pairs, (1.0 - share) * (clean - other)).logits(batch)

    return pairs.sequences.gradients(torch.cat([*pairs.in_batches(logits)]))


@dataclass
class _Reading:
    """One run of the model with gradients; its input is the clean embedding minus `removed`.

    Attributes:
        pairs: the clean and counterfactual prompts.
        removed: the tensor that is subtracted from the embedding.
        anew: kinds of receivers, as (layer, "q" or "k"), whose attention is computed again (method "EAP-QK").
        read: activation at each entry of `Graph.receiver_inputs`, by its index; not for kinds in `anew`.
        z: output of the heads before W_O, by layer, for layers in `anew`.
        passed: activations that receivers and attention read, by hook name.
        gradient: gradients of `read` and `z`, by ("read", index) and ("z", layer), set by `run`. None if the metric
            does not depend on the activation.
    """

    pairs: Pairs
    removed: Float[Tensor, "batch pos d_model"]
    anew: Sequence[tuple[int, Input]] = ()
    read: dict[int, Tensor] = field(default_factory=dict)
    z: dict[int, Tensor] = field(default_factory=dict)
    passed: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)

    def logits(self, batch: slice) -> Tensor:
        """Run a batch of pairs with this object's hooks, and return the logits at the positions that the metric reads.

        `batch` is a slice of pairs. The hooks fill `read`, `z` and `passed`.
        """
        sequences, view = self.pairs.sequences, self.pairs.view
        with view.hooks_on(self._hooks()):
            return logits_at(view, sequences.tokens[batch], sequences.predicted_of(batch))

    def run(self, batch: slice, of_logits: Tensor | None) -> None:
        """Run a batch of pairs forward and backward, and set `read`, `z`, `passed` and `gradient` of this object.

        `batch` is a slice of pairs. `of_logits` is the gradient of the metric in the logits; None computes it from the
        metric.
        """
        with torch.enable_grad():
            logits = self.logits(batch)
        sequences = self.pairs.sequences
        of_logits = sequences.gradients(logits, batch) if of_logits is None else of_logits
        nodes = {("read", at): activation for at, activation in self.read.items()}
        nodes |= {("z", layer): activation for layer, activation in self.z.items()}
        gradients = torch.autograd.grad(logits, list(nodes.values()), of_logits.to(logits), allow_unused=True)
        self.gradient = dict(zip(nodes, gradients, strict=True))

    def of_windows(self, held: HeldWrites) -> Iterator[tuple[Sequence[int], Float[Tensor, "receivers batch late d"]]]:
        """Yield pairs (indices of receivers, gradients in the streams that they read), for a few layers at a time.

        Gradients are at the last positions of the prompts, as many as the writes `held` have. Several layers come
        together if they fit into memory. `run` must have been called.
        """
        graph, inputs = self.pairs.graph, sorted(self.read)
        kinds = dict.fromkeys(graph.receiver_inputs[place][0] for place in inputs)
        waiting = [place for kind in kinds for place in range(*graph.kinds[kind].indices(len(graph.receivers)))]
        shape = held.whole[0].shape
        while waiting:
            some = held.first_layers(waiting)
            streams = held.whole[0].new_zeros(len(some), *shape)
            for place in inputs:
                kind, read = graph.receiver_inputs[place]
                rows, gradient = graph.kinds[kind], self.gradient["read", place]
                # None if the metric does not depend on this input.
                if gradient is not None and some[0] <= rows.start <= some[-1]:
                    of_stream = read.gradient(widened(gradient), self.passed)[:, :, -shape[1] :]
                    first = some.index(rows.start)
                    streams[first : first + len(of_stream)] += of_stream.to(streams)
            yield some, streams
            waiting = waiting[len(some) :]

    def of_patterns(self) -> Iterator[tuple[slice, ReceiverLayer, Float[Tensor, "batch heads pos pos"]]]:
        """Yield for each kind in `anew` the slice of its receivers, the layer's attention, and the receivers' gradient.

        The attention is a `ReceiverLayer`, in which queries or keys can be changed. A kind that the metric does not
        depend on is left out. Raises ScoreMismatch if the attention of the run cannot be computed again.
        """
        view = self.pairs.view
        for kind in self.anew:
            gradient = self.gradient["z", kind[0]]
            if gradient is not None:  # None if the metric does not depend on the layer
                attention = attention_of(view, self.passed, *kind)
                values = view.raw(kind[0]).values(self.passed[view.hook_names(kind[0])["value"]])
                of_attention = gradient_of_attention(attention, self.z[kind[0]].detach(), gradient, values)
                yield self.pairs.graph.kinds[kind], attention, of_attention

    def _hooks(self) -> list[Hook]:
        """Return the `fwd_hooks` list that sets the input of this run and fills `read`, `z` and `passed`."""
        view, layers = self.pairs.view, list(dict.fromkeys(layer for layer, _ in self.anew))
        every = enumerate(self.pairs.graph.receiver_inputs)
        # Of gated attention the gate is read as it is; other inputs of a kind in `anew` go into attention made again.
        inputs = [
            (place, read)
            for place, (kind, read) in every
            if kind not in self.anew or not isinstance(read.reads, LayerReads) or read.reads.point == "gate"
        ]
        passing = dict.fromkeys(read.names[point] for _, read in inputs for point in read.streams)
        names = [view.hook_names(layer) for layer in layers]
        passing |= dict.fromkeys(own[point] for own in names for point in (*READ_POINTS, "value") if point in own)
        return [
            (view.hook_names(0)["residual"], self._start),
            *holding(self.passed, passing),
            *((read.point, partial(self._keep, self.read, place)) for place, read in inputs),
            *((own["z"], partial(self._keep, self.z, layer)) for layer, own in zip(layers, names, strict=True)),
        ]

    def _start(self, x: Tensor, hook: Any) -> Tensor:
        """Return the embedding `x` minus `removed`, as a tensor that records gradients. `hook` is not used."""
        return (x.detach() - self.removed.to(x)).requires_grad_()

    def _keep(self, kept: dict[int, Tensor], place: int, activation: Tensor, hook: Any) -> Tensor:
        """Store a view of the activation in the dict `kept` under the number `place`, and return this view.

        The model then computes with the view, so that the gradient in it can be taken. `hook` is not used.
        """
        # A view is a new node of the graph. Otherwise the gradient would include other readers of the same stream.
        kept[place] = activation.view_as(activation)
        return kept[place]
