"""How widely and how far a head attends, with the first token of a prompt and without it.

Each measure is a ratio N / D of sums over prompts, whose error is the error of the ratio. A mean over prompts has N of
a prompt its mean over queries, and D = 1.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tlspectral.models.reading.view import AttentionView
from tlspectral.models.running.batches import PackedTokens

MEASURES = ("entropy", "distance", "start_share", "entropy_sinkless", "distance_sinkless", "sinkless_rows")
KEPT = 0.05
"""Attention to keys other than the first that a row keeps, at least, for its entropy without the first to count."""


class Spread:
    """Collects the measures of all heads while prompts run, batch after batch, and keeps sums alone.

    `copies` says how many prompts are equal to each, itself among them, which are one observation; None: all are.
    """

    def __init__(self, view: AttentionView, prompts: PackedTokens, copies: Float64[Tensor, "sequences"] | None):
        self.view = view
        self.queries = prompts.real & (torch.arange(prompts.tokens.shape[1]) >= 2)
        self.times = torch.ones(len(prompts.tokens), dtype=torch.float64) if copies is None else copies
        self._of_batch: dict[int, Tensor] = {}
        self._sums: dict[int, Tensor] = {}  # by layer, [N, D, then N N, N D, D D times copies; measures; heads]

    def read(self, layer: int, pattern: Float[Tensor, "batch heads query key"], rows: slice) -> None:
        """Add what a layer attends to in a batch; of a layer that runs several times in a pass the mean."""
        found = _parts(pattern, self.queries[rows]) / self.view.blocks[layer].runs
        self._of_batch[layer] = found + self._of_batch.get(layer, 0)

    def end_batch(self, rows: slice) -> None:
        """Add a batch, which all layers have read, to the sums."""
        for layer, parts in self._of_batch.items():
            self._sums[layer] = _moments(parts, self.times[rows]) + self._sums.get(layer, 0)
        self._of_batch.clear()

    def measured(self) -> dict[str, Float64[np.ndarray, " heads"]]:
        """Return each measure of all heads, and its standard error over distinct prompts; NaN below two that count."""
        sums = torch.cat([self._sums[layer] for layer in self.view.layers], dim=-1)
        over = sums[0] / sums[1]
        squares = sums[2] - 2 * over * sums[3] + over.square() * sums[4]
        n = (self.queries.any(1) / self.times).sum().round()
        factor = n / (n - 1) if n > 1 else torch.tensor(torch.nan)
        error = (factor * squares.clamp_min(0)).sqrt() / sums[1]
        found: dict[str, Float64[np.ndarray, " heads"]] = {}
        for place, name in enumerate(MEASURES):
            found |= {name: over[place].numpy(), f"{name}_se": error[place].numpy()}
        return found

    def uniform(self) -> dict[str, float | None]:
        """Return what a head that attends alike to all keys that its queries see would have; None where none counts."""
        width, total = self.queries.shape[1], torch.zeros(2, len(MEASURES), dtype=torch.float64)
        seen = torch.ones(width, width) if not self.view.causal else torch.ones(width, width).tril()
        pattern = (seen / seen.sum(-1, keepdim=True))[None, None]
        for counted, times in zip(*torch.unique(self.queries, dim=0, return_counts=True), strict=True):
            total += times * _parts(pattern, counted[None])[..., 0, 0]
        values = (total[0] / total[1]).tolist()
        return {name: value if value == value else None for name, value in zip(MEASURES, values, strict=True)}


def _parts(
    pattern: Float[Tensor, "batch heads query key"], counted: Bool[Tensor, "batch query"]
) -> Float64[Tensor, "2 measures batch heads"]:
    """Return N and D of each measure, prompt and head, summed over the queries that count."""
    weights = pattern.detach().float()
    others, position = weights[..., 1:], torch.arange(pattern.shape[-1], device=pattern.device)
    behind = (position[:, None] - position[1:]).abs().float()
    # A row's attention to the first key; and to the others: their sum, their distances, and -a log a.
    by_row = [weights[..., 0], others.sum(-1), (others * behind).sum(-1), -torch.xlogy(others, others).sum(-1)]
    first, rest, far, spread = torch.stack(by_row).cpu().double()
    query = torch.arange(pattern.shape[-2], dtype=torch.float64)
    kept = (rest >= KEPT).double()
    within = kept * (spread / rest.clamp_min(KEPT) + rest.clamp_min(KEPT).log())
    rows = torch.stack([spread - torch.xlogy(first, first), far + first * query, first, kept, within, far, rest])
    sums = (rows * counted[:, None]).sum(-1)  # [rows, batch, heads]
    n_queries: Int[Tensor, "batch 1"] = counted.sum(1)[:, None]
    means = sums[:4] / n_queries.clamp_min(1)
    one = (n_queries > 0).double().expand_as(sums[0])
    return torch.stack(
        [
            torch.stack([means[0], means[1], means[2], sums[4], sums[5], means[3]]),
            torch.stack([one, one, one, sums[3], sums[6], one]),
        ]
    )


def _moments(
    parts: Float64[Tensor, "2 measures batch heads"], times: Float64[Tensor, "batch"]
) -> Float64[Tensor, "5 measures heads"]:
    """Return the sums over a batch of N, D, and of their products, each times the copies of its prompt."""
    numerator, denominator = parts
    products = torch.stack([numerator.square(), numerator * denominator, denominator.square()])
    return torch.cat([parts.sum(2), (products * times[:, None]).sum(2)])
