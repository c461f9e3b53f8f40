"""A task of pairs on one model: what is written on either side, and the score of any circuit."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tlspectral.errors import EditNotHonored
from tlspectral.hooks.circuits.graph import Graph
from tlspectral.hooks.circuits.run import cut_logits, written_by
from tlspectral.models.attention import AttentionView, attention_view
from tlspectral.models.attention.causality import require_stream
from tlspectral.models.attention.closeness import require_close
from tlspectral.models.attention.layer import require_every_key
from tlspectral.models.attention.padding import PackedTokens
from tlspectral.models.attention.replay import logits_at
from tlspectral.tables.progress import bar
from tlspectral.tasks import ScoredSequences, Task, score_of, scored_sequences
from tlspectral.tasks.scoring import Scores

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
        """A hash of each pair, the same with its sides exchanged: tables keep the pairs on which they were made."""
        both = zip(self.sequences.tokens, self.other.tokens, strict=True)
        sides = (sorted(one.contiguous().numpy().tobytes() for one in pair) for pair in both)
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

    Raises:
        ValueError: a task without counterfactual prompts; as `require_every_key` and `scored_sequences`.
        EditNotHonored: a run with no edge kept is not that of the counterfactual prompts.
        UnsupportedArchitecture: as `AttentionView.raw` and `mlp_reads`.
    """
    view = attention_view(model)
    require_stream(view)
    sequences = scored_sequences(view, task)
    if sequences.counterfactual is None:
        raise ValueError(f"{sequences.name} has no counterfactual prompts: give Task(..., counterfactual=)")
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
