"""First-order estimates of the effect of every edge: edge attribution patching, with or without integrated gradients.

EAP is Syed et al. 2023 ("Attribution Patching Outperforms Automated Circuit Discovery"), EAP-IG Hanna et al. 2024
("Have Faith in Faithfulness"), whose gradients are a mean over inputs between the two prompts. EAP-QK takes attention
anew, see `circuits.query_key_estimates`.
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
from tlspectral.hooks.edges.cut import ReceiverInput
from tlspectral.hooks.edges.measuring import ReceiverLayer
from tlspectral.hooks.edges.senders import READ_POINTS
from tlspectral.models.hooking.placing import Hook, holding
from tlspectral.models.running.partial_runs import logits_at, require_gradients
from tlspectral.models.running.passes import capture_until
from tlspectral.models.stream.writes import Input, LayerReads
from tlspectral.tables.progress import bar

Method = Literal["EAP", "EAP-IG", "EAP-QK"]
"""How edges are estimated: gradients at the clean run, their mean on the way to the pair, or whole queries and keys."""
STEPS = {"EAP": (1.0,), "EAP-IG": (0.2, 0.4, 0.6, 0.8, 1.0), "EAP-QK": (1.0,)}
"""Share of the clean embedding at which gradients are taken; the rest is the embedding of the counterfactual prompt."""


_MOST_BYTES = 2**30  # of terms of estimates
_LEAST_BLOCKS = 32


@dataclass(frozen=True)
class Estimates:
    """First-order estimates of the effects of all edges, as sums of terms.

    A term is what a unit of pairs adds to the mean over all pairs. Units are the distinct pairs; where their terms take
    more than 1 GiB, blocks of them; all pairs together for a metric whose value of a prompt depends on others.

    Attributes:
        terms: of each unit, for each position at which edges are cut.
        sizes: pairs of each unit.
        units: `"pairs"`, `"blocks"` or `"all"`.
    """

    terms: Float64[np.ndarray, "units positions receivers senders"]
    sizes: Int[np.ndarray, "units"]
    units: Literal["pairs", "blocks", "all"]


@torch.no_grad()
def edge_estimates(pairs: Pairs, method: Method, at: Sequence[Int[Tensor, "pairs"]] = ()) -> Estimates:
    """Return the estimate of metric(edge cut to its counterfactual) - metric(clean) for every edge, by pairs.

    `at` are positions at which edges are cut, one of each pair, each alone; without any they are cut at all at once.
    Raises ValueError under `torch.inference_mode`, and for a model that was loaded under it; with `"EAP-QK"` as
    `taken_anew` and `attention_of` too.

    It is the gradient of the metric in what the receiver reads, times the counterfactual less the clean write of the
    sender. One ordinary backward pass gives the gradients at the queries, keys and values of all heads, at what MLPs
    read and behind the last layer; each is carried to the receiver's own residual stream by its weights and the
    Jacobian of its norm. With `"EAP-QK"` it is, for queries and keys, the gradient in the attention times its change,
    see `attention_effects`.
    """
    require_gradients(pairs.view, "screen='gradient'")
    anew = taken_anew(pairs.view) if method == "EAP-QK" else []
    graph, sequences, other = pairs.graph, pairs.sequences, pairs.other
    masks = [places[:, None] == torch.arange(sequences.tokens.shape[1]) for places in at] or [sequences.real]
    steps, n = STEPS[method], len(sequences.tokens)
    kind, unit = _units(pairs, len(masks) * graph.possible.size)
    found = torch.zeros(int(unit.max()) + 1, len(masks), *graph.possible.shape, dtype=torch.float64)
    of_logits: dict[float, Tensor] = {}
    with bar(n * len(steps), method, "run of a pair") as shown:

        def estimates(batch: slice) -> tuple[Tensor, Tensor]:
            of_units, place_of = unit[batch].unique(return_inverse=True)
            of_batch = found.new_zeros(len(of_units), *found.shape[1:])
            differences = pairs.differences(batch)
            embedding = differences.whole[0]
            # Before the first token that differs, nothing is written that an edge could carry.
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
                given = None
                if not sequences.by_rows and batch.stop - batch.start < n:  # the metric gets all prompts at once
                    # It is the same for all batches of a share, and takes a run of all pairs.
                    if share not in of_logits:
                        of_logits[share] = _logit_gradients(pairs, share)
                    given = of_logits[share][batch]
                reading.run(batch, given)
                for receivers, gradients in reading.of_windows(late):
                    gradients = gradients if chosen is None else _at(chosen, gradients)
                    products = _products(graph, receivers, gradients, removed) / (n * len(steps))
                    of_pairs = products.unflatten(0, (len(embedding), -1))
                    of_batch[:, :, receivers] -= _by_unit(of_pairs, place_of, len(of_units))
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
            found.index_add_(0, of_units, of_batch)
    return Estimates(found.numpy(), np.bincount(unit.numpy()), kind)


def _at(positions: Int[Tensor, "batch chosen"], held: Float[Tensor, "*some batch late d"]) -> Tensor:
    """Return what is held at some positions of each row, each as a row of its own; 0 at those in front of all."""
    index = positions.clamp(min=0)[..., None].to(held.device)
    found = held.gather(-2, index.expand(*held.shape[:-3], *index.shape[:2], held.shape[-1]))
    return (found * (positions >= 0)[..., None].to(found)).flatten(-3, -2).unsqueeze(-2)


def _products(
    graph: Graph, receivers: Sequence[int], gradients: Float[Tensor, "receivers rows pos d"], removed: HeldWrites
) -> Float64[Tensor, "rows receivers senders"]:
    """Return the gradients in the streams of receivers times what each sender writes; 0 where there is no edge."""
    n_before = [graph.n_before(graph.receivers[place]) for place in receivers]
    found = torch.zeros(gradients.shape[1], len(receivers), len(graph.senders), dtype=torch.float64)
    for senders, rows, tokens, written in removed.pieces(slice(0, n_before[-1])):
        reading = slice(bisect_right(n_before, senders.start), None)
        of_rows = gradients[reading, rows, tokens].flatten(2).transpose(0, 1)
        found[rows, reading, senders] += torch.bmm(of_rows, written.flatten(2).permute(1, 2, 0)).double().cpu()
    return found * torch.as_tensor(graph.possible[receivers])


def _by_unit(of_pairs: Float64[Tensor, "batch *shape"], place: Int[Tensor, "batch"], n: int) -> Tensor:
    return of_pairs.new_zeros(n, *of_pairs.shape[1:]).index_add_(0, place, of_pairs)


def _units(pairs: Pairs, numbers: int) -> tuple[Literal["pairs", "blocks", "all"], Int[Tensor, "pairs"]]:
    """Return the unit that each pair belongs to, and what units are, where one takes so many numbers."""
    sequences, n, distinct = pairs.sequences, len(pairs.sequences.tokens), pairs.sequences.distinct

    def logits() -> Tensor:
        return torch.cat([*pairs.in_batches(partial(_plain_logits, pairs))])

    if not sequences.of_each_row(logits):
        return "all", torch.zeros(n, dtype=torch.int64)
    unit = torch.arange(n) if distinct is None else torch.as_tensor(distinct)
    most = max(_LEAST_BLOCKS, _MOST_BYTES // (8 * numbers))
    if int(unit.max()) < most:
        return "pairs", unit
    return "blocks", unit % most


def _plain_logits(pairs: Pairs, batch: slice) -> Float[Tensor, "batch predicted d_vocab"]:
    sequences = pairs.sequences
    return logits_at(pairs.view, sequences.tokens[batch], sequences.predicted_of(batch)).float()


def _logit_gradients(pairs: Pairs, share: float) -> Float[Tensor, "pairs predicted d_vocab"]:
    """Return the gradient in the logits of a metric that gets all prompts at once, at a share of the embedding."""
    view, point = pairs.view, pairs.view.hook_names(0)["residual"]

    def logits(batch: slice) -> Tensor:
        clean, other = (
            widened(capture_until(view, side.tokens[batch], [point], last=point)[point])
            for side in (pairs.sequences, pairs.other)
        )
        return _Reading(pairs, (1.0 - share) * (clean - other)).logits(batch)

    return pairs.sequences.gradients(torch.cat([*pairs.in_batches(logits)]))


@dataclass
class _Reading:
    """One run with gradients, from the clean embedding without what is `removed`.

    `anew` are the kinds of receivers whose attention is taken anew. `read[i]` is the activation at the i-th of
    `Graph.receiver_inputs`, unless its attention is taken anew; `z[layer]` is the z of a layer. `gradient` holds their
    gradients once `run` has returned. `passed` are streams that receivers read, or their parts, and what attention
    read, by hook point.
    """

    pairs: Pairs
    removed: Float[Tensor, "batch pos d_model"]
    anew: Sequence[tuple[int, Input]] = ()
    read: dict[int, Tensor] = field(default_factory=dict)
    z: dict[int, Tensor] = field(default_factory=dict)
    passed: dict[str, Tensor] = field(default_factory=dict)
    gradient: dict[tuple[str, int], Tensor | None] = field(default_factory=dict)

    def logits(self, batch: slice) -> Tensor:
        """Return the logits of a batch that the metric gets."""
        sequences, view = self.pairs.sequences, self.pairs.view
        with view.hooks_on(self._hooks()):
            return logits_at(view, sequences.tokens[batch], sequences.predicted_of(batch))

    def run(self, batch: slice, of_logits: Tensor | None) -> None:
        """Run the model on a batch forth and back, from the gradient in the logits if it is given."""
        with torch.enable_grad():
            logits = self.logits(batch)
        sequences = self.pairs.sequences
        of_logits = sequences.gradients(logits, batch) if of_logits is None else of_logits
        nodes = {("read", at): one for at, one in self.read.items()}
        nodes |= {("z", layer): one for layer, one in self.z.items()}
        found = torch.autograd.grad(logits, list(nodes.values()), of_logits.to(logits), allow_unused=True)
        self.gradient = dict(zip(nodes, found, strict=True))

    def of_windows(self, held: HeldWrites) -> Iterator[tuple[Sequence[int], Float[Tensor, "receivers batch late d"]]]:
        """Yield places of receivers of some layers and the gradients in the streams that these read.

        They are those at the last positions, as many as are held of what is written.
        """
        graph, inputs = self.pairs.graph, sorted(self.read)
        kinds = dict.fromkeys(graph.receiver_inputs[place][0] for place in inputs)
        waiting = [place for kind in kinds for place in range(*graph.kinds[kind].indices(len(graph.receivers)))]
        shape = held.whole[0].shape
        while waiting:
            some = held.first_layers(waiting)
            streams = held.whole[0].new_zeros(len(some), *shape)
            for place in inputs:
                kind, one = graph.receiver_inputs[place]
                rows, gradient = graph.kinds[kind], self.gradient["read", place]
                # The metric may depend on nothing that this input leads to.
                if gradient is not None and some[0] <= rows.start <= some[-1]:
                    of_stream = one.gradient(widened(gradient), self.passed)[:, :, -shape[1] :]
                    first = some.index(rows.start)
                    streams[first : first + len(of_stream)] += of_stream.to(streams)
            yield some, streams
            waiting = waiting[len(some) :]

    def of_patterns(self) -> Iterator[tuple[slice, ReceiverLayer, Float[Tensor, "batch heads pos pos"]]]:
        """Yield places of receivers, the attention that is taken anew for them, and the gradient in it."""
        view = self.pairs.view
        for kind in self.anew:
            gradient = self.gradient["z", kind[0]]
            if gradient is not None:  # else nothing that is scored reads the layer
                attention = attention_of(view, self.passed, *kind)
                values = view.raw(kind[0]).values(self.passed[view.hook_names(kind[0])["value"]])
                of_attention = gradient_of_attention(attention, self.z[kind[0]].detach(), gradient, values)
                yield self.pairs.graph.kinds[kind], attention, of_attention

    def _hooks(self) -> list[Hook]:
        view, layers = self.pairs.view, list(dict.fromkeys(layer for layer, _ in self.anew))
        every = enumerate(self.pairs.graph.receiver_inputs)
        inputs = [(place, one) for place, (kind, one) in every if not self._is_anew(kind, one)]
        passing = dict.fromkeys(one.names[point] for _, one in inputs for point in one.streams)
        names = [view.hook_names(layer) for layer in layers]
        passing |= dict.fromkeys(each[point] for each in names for point in (*READ_POINTS, "value") if point in each)
        return [
            (view.hook_names(0)["residual"], self._start),
            *holding(self.passed, passing),
            *((one.point, partial(self._keep, self.read, place)) for place, one in inputs),
            *((each["z"], partial(self._keep, self.z, layer)) for layer, each in zip(layers, names, strict=True)),
        ]

    def _is_anew(self, kind: Any, one: ReceiverInput) -> bool:
        """Return whether an input is in the attention that is taken anew: a gate of queries is not."""
        return kind in self.anew and isinstance(one.reads, LayerReads) and one.reads.point != "gate"

    def _start(self, x: Tensor, hook: Any) -> Tensor:
        return (x.detach() - self.removed.to(x)).requires_grad_()

    def _keep(self, kept: dict[int, Tensor], place: int, activation: Tensor, hook: Any) -> Tensor:
        # A node of its own: a stream or norm that others read too has their gradients in it.
        kept[place] = activation.view_as(activation)
        return kept[place]
