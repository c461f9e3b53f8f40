"""First-order estimates of the effect of every edge: edge attribution patching, with or without integrated gradients.

EAP is Syed et al. 2023 ("Attribution Patching Outperforms Automated Circuit Discovery"), EAP-IG Hanna et al. 2024
("Have Faith in Faithfulness"), whose gradients are a mean over inputs between the two prompts.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from tlspectral.algebra.rotary import widened
from tlspectral.hooks.circuits.pairs import Pairs
from tlspectral.models.attention.replay import logits_at
from tlspectral.models.attention.threads import Hook, hooks_on
from tlspectral.models.attention.writes import INPUT_POINTS
from tlspectral.selection import Receiver
from tlspectral.tables.progress import bar

Method = Literal["EAP", "EAP-IG"]
STEPS = {"EAP": (1.0,), "EAP-IG": (0.2, 0.4, 0.6, 0.8, 1.0)}
"""Share of the clean embedding at which gradients are taken; the rest is that of the counterfactual prompt."""


@torch.no_grad()
def edge_estimates(pairs: Pairs, method: Method) -> Float64[np.ndarray, "receivers senders"]:
    """Return the estimate of metric(edge cut to its counterfactual) - metric(clean) for every edge, mean over pairs.

    It is the gradient of the metric in what the receiver reads, times the counterfactual less the clean write of the
    sender. One ordinary backward pass gives the gradients at the queries, keys and values of all heads, at what MLPs
    read and behind the last layer; each is carried to the receiver's own residual stream by its weights and the
    Jacobian of its norm.
    """
    graph, n = pairs.graph, len(pairs.sequences.tokens)
    found = torch.zeros(len(graph.receivers), len(graph.senders), dtype=torch.float64)
    batches, steps = list(pairs.batches()), STEPS[method]
    whole = pairs.sequences.by_rows or len(batches) == 1
    of_logits = {} if whole else {share: _logit_gradients(pairs, share) for share in steps}
    with bar(len(batches) * len(steps), method, "pass") as shown:
        for batch in batches:
            differences = pairs.differences(batch)
            # Before the first token that differs, nothing is written that an edge could carry.
            first = int((pairs.sequences.tokens[batch] != pairs.other.tokens[batch]).any(0).float().argmax())
            for share in steps:
                reading = _Reading(pairs, (1.0 - share) * differences[0])
                reading.run(batch, of_logits[share][batch] if share in of_logits else None)
                for receiver, gradients in reading.gradients():
                    row, before = graph.receiver_index[receiver], graph.n_before(receiver)
                    product = torch.einsum(
                        "rbpd,sbpd->rs", gradients[:, :, first:], differences[:before, :, first:].to(gradients)
                    )
                    found[row : row + len(product), :before] -= product.double().cpu() / (n * len(steps))
                shown.update(1)
    return found.numpy()


def _score(pairs: Pairs, logits: Tensor, batch: slice) -> Tensor:
    """Return the sum of the scores of a batch. Raises ValueError for a metric without a gradient."""
    score = pairs.sequences.measured(logits, batch).sum()
    if not score.requires_grad:
        raise ValueError(
            f"estimates need a metric with a gradient, and that of {pairs.sequences.name} has none (an argmax, a "
            "comparison or .item() cuts it off): measure edges without screen="
        )
    return score


def _logit_gradients(pairs: Pairs, share: float) -> Float[Tensor, "pairs scored d_vocab"]:
    """Return the gradient in the logits of a metric that gets all prompts at once, at a share of the embedding."""
    view, point = pairs.view, pairs.layers[0].names["residual"]
    found = []
    for batch in pairs.batches():
        clean, other = (
            widened(view.capture(side.tokens[batch], [point], last=point)[point])
            for side in (pairs.sequences, pairs.other)
        )
        found.append(_Reading(pairs, (1.0 - share) * (clean - other)).logits(batch))
    whole = torch.cat(found).requires_grad_()
    with torch.enable_grad():
        score = _score(pairs, whole, slice(None))
    return torch.autograd.grad(score, whole)[0]


@dataclass
class _Reading:
    """One run with gradients, from an embedding between the two prompts.

    Attributes:
        removed: what is taken out of the clean embedding.
        read: what all receivers of a kind in a layer read in the run, by layer and kind.
        streams: what the receivers of each layer read, or its parts, by layer and point.
        found: the gradient of the score in what is read, by layer and kind.
    """

    pairs: Pairs
    removed: Float[Tensor, "batch pos d_model"]
    read: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    streams: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    found: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def logits(self, batch: slice) -> Tensor:
        """Return the logits of a batch that are scored."""
        sequences, model = self.pairs.sequences, self.pairs.view.model
        with hooks_on(model, model.hook_dict, self._hooks()):
            return logits_at(self.pairs.view, sequences.tokens[batch], sequences.scored_of(batch))

    def run(self, batch: slice, of_logits: Tensor | None) -> None:
        """Run the model on a batch and take the gradient of its scores, from that in the logits if it is given."""
        with torch.enable_grad():
            logits = self.logits(batch)
            score = logits if of_logits is not None else _score(self.pairs, logits, batch)
        gradients = torch.autograd.grad(score, list(self.read.values()), of_logits, allow_unused=True)
        self.found = {
            key: torch.zeros_like(read) if gradient is None else gradient
            for (key, read), gradient in zip(self.read.items(), gradients, strict=True)
        }

    def _hooks(self) -> list[Hook]:
        layers = self.pairs.layers
        found: list[Hook] = [(layers[0].names["residual"], self._start)]
        for index, layer in enumerate(layers):
            mlp = self.pairs.graph.mlps[index]
            points = {"residual", *(() if mlp is None else mlp.reads)}
            found += [(layer.names[point], partial(self._note, index, point)) for point in points]
            found += [(layer.names[INPUT_POINTS[what]], partial(self._keep, (index, what))) for what in layer.reads]
            found += [] if mlp is None else [(mlp.point, partial(self._keep, (index, "mlp")))]
        return [*found, (layers[-1].names["residual_after"], partial(self._keep, (len(layers), "logits")))]

    def _start(self, x: Tensor, hook: Any) -> Tensor:
        return (x.detach() - self.removed.to(x)).requires_grad_()

    def _note(self, index: int, point: str, activation: Tensor, hook: Any) -> None:
        self.streams.setdefault(index, {})[point] = activation.detach()

    def _keep(self, key: tuple[int, str], activation: Tensor, hook: Any) -> Tensor:
        # A node of its own: a stream or norm that others read too has their gradients in it.
        self.read[key] = activation.view_as(activation)
        return self.read[key]

    def gradients(self) -> Any:
        """Yield the first receiver of each kind in each layer, and the gradients in the streams that these read."""
        graph = self.pairs.graph
        for (index, what), gradient in self.found.items():
            gradient = widened(gradient)
            if what == "logits":
                yield graph.receivers[-1], gradient[None]
                continue
            streams = {point: widened(stream) for point, stream in self.streams[index].items()}
            x = streams["residual"]
            if what == "mlp":
                mlp = graph.mlps[index]
                assert mlp is not None
                x = mlp.stream(streams)
                yield Receiver(index, -1, "mlp"), mlp.gradient(gradient, x)[None]
                continue
            reads = self.pairs.layers[index].reads[what]  # pyright: ignore[reportArgumentType]
            count, _, d_head = reads.weight.shape
            by_head = gradient.reshape(*gradient.shape[:2], count, -1, d_head).sum(3)  # of repeated keys together
            of_stream = torch.einsum("bphd,hmd->hbpm", by_head, reads.weight.to(by_head))
            yield graph.own(Receiver(index, 0, what, what != "q")), reads.norm.gradient(of_stream, x)
