"""The score of a task when one edge is cut: the model goes on from the target's layer with the changed input."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.models.attention.replay import IntactRun
from tlspectral.models.attention.threads import hooks_on
from tlspectral.models.attention.writes import INPUT_POINTS
from tlspectral.tasks import ScoredSequences, Scores
from tlspectral.wiring.targets import TargetLayer


@dataclass(frozen=True)
class Replayed:
    """An intact run, from which the model goes on from a target's layer, and the score of each of its sequences."""

    intact: IntactRun
    values: Float64[np.ndarray, "sequences"]
    sequences: ScoredSequences

    @torch.no_grad()
    def deltas(
        self,
        target: TargetLayer,
        heads: list[int],
        change: Float64[Tensor, "sources sequences pos heads d_head"],
    ) -> Float64[np.ndarray, "targets sources sequences"]:
        """Return the score with each edge cut, less the intact one. Several edges are stacked on the batch axis."""
        view, layer = self.intact.view, target.layer.layer
        point = view.hook_names(layer)[INPUT_POINTS[target.what]]
        jobs = [(head, source) for head in heads for source in range(len(change))]
        n = len(self.sequences.tokens)
        values = torch.zeros(len(jobs), n, dtype=torch.float64)
        stack = max(1, self.sequences.rows_at_once(view) // n)
        for first in range(0, len(jobs), stack):
            chunk = jobs[first : first + stack]
            scores = Scores(self.sequences, len(chunk))
            for batch in self.sequences.batches(view):
                edit = _edit(target, chunk, change[:, batch])
                with hooks_on(view.model, self.intact.points, [(point, edit)]):
                    scores.add(batch, self.intact.replay(layer, batch, len(chunk)))
            values[first : first + len(chunk)] = scores.result()
        return values.view(len(heads), len(change), n).numpy() - self.values


def _edit(target: TargetLayer, jobs: list[tuple[int, int]], change: Tensor) -> Callable[..., Tensor]:
    """Return the hook that adds to each copy of the batch the change of its own source and target."""

    def edit(activation: Tensor, hook: Any) -> Tensor:
        edited = activation.reshape(*activation.shape[:2], -1, target.layer.d_head).clone()
        copies = edited.unflatten(0, (len(jobs), -1))
        n_heads = edited.shape[2]
        for copy, (head, source) in zip(copies, jobs, strict=True):
            if target.what == "q":
                of_change, reached = head, [head]
            else:
                of_change = target.layer.kv_head(head)
                size = n_heads // target.layer.n_kv_heads  # some models repeat keys, one per query head
                reached = list(range(of_change * size, (of_change + 1) * size))
            copy[:, :, reached] += change[source, :, :, of_change].to(copy)[:, :, None]
        return edited.reshape(activation.shape)

    return edit
