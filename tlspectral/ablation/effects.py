"""Scores without a part of each head of one layer, or with a random part of the same RMS as a control for its size.

Blocks are replayed from that layer, several heads in a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tlspectral.hooks.layer_ablation import LayerAblation
from tlspectral.models.attention.replay import IntactRun
from tlspectral.models.attention.threads import Hook, hooks_on
from tlspectral.nulls import haar_frame
from tlspectral.parts import Bound
from tlspectral.parts.blocks import BlockPlaces, BlockRemoval
from tlspectral.parts.output import Replacement
from tlspectral.parts.query_key import ScoreRemoval
from tlspectral.parts.scores import Removal
from tlspectral.tasks import ScoredSequences, Scores


@dataclass(frozen=True)
class LayerEffects:
    """Scores of a model with a layer's heads ablated; `controls` with a random part of equal size removed instead.

    `score_rms` is the root mean square of the removed part, over the unmasked pairs of a sequence and then over
    sequences; NaN for a part of the mask or of z.
    """

    values: Float64[np.ndarray, "heads sequences"]
    score_rms: Float64[np.ndarray, "heads"]
    controls: Float64[np.ndarray, "heads draws sequences"]


def unpadded(removal: Removal, sequences: ScoredSequences, batch: slice) -> Removal:
    """Return a removal in a run of these sequences, with allowed pairs limited to those without padding.

    Padding follows the sequence, so only queries of padding see keys of padding: masking queries is enough.
    """
    if removal.allowed is None or not sequences.padded:
        return removal
    queries = sequences.real[batch][:, None, :, None].to(removal.allowed.device)
    return replace(removal, allowed=(removal.allowed & queries).expand_as(removal.difference))


def replayed_scores(
    intact: IntactRun, sequences: ScoredSequences, layer: int, hooks: list[Hook]
) -> Float64[np.ndarray, "sequences"]:
    """Return the score of each sequence when the blocks from a layer on run again under hooks."""
    scores = Scores(sequences, 1)
    with torch.no_grad(), hooks_on(intact.view.model, intact.points, hooks):
        for batch in sequences.batches(intact.view):
            scores.add(batch, intact.replay(layer, batch, 1))
    return scores.result()[0].numpy()


def layer_effects(
    intact: IntactRun,
    sequences: ScoredSequences,
    layer: int,
    heads: list[int],
    part: Bound,
    *,
    draws: int = 0,
    seed: int = 0,
) -> LayerEffects:
    """Ablate each of the heads in turn, on all sequences, by a part that is bound to them.

    A job is a head and either the part itself (draw -1) or a random part; as many jobs as memory allows are stacked on
    the batch axis. Stacking changes numbers by rounding only.
    """
    view, folded = intact.view, intact.view.layer(layer)
    jobs = [(head, draw) for head in heads for draw in range(-1, draws)]
    n, rows = len(sequences.tokens), sequences.rows_at_once(view)
    values = torch.zeros(len(jobs), n, dtype=torch.float64)
    squares = torch.full((len(jobs), n), torch.nan, dtype=torch.float64)
    stack = max(1, rows // n)
    with torch.no_grad():
        for first in range(0, len(jobs), stack):
            chunk = slice(first, min(first + stack, len(jobs)))
            chosen = [head for head, _ in jobs[chunk]]
            scores = Scores(sequences, len(chosen))
            for batch in sequences.batches(view):
                ablation = LayerAblation(view, folded, chosen, part, stacked=True)
                if isinstance(part, ScoreRemoval | BlockRemoval):
                    blocks = part.places if isinstance(part, BlockRemoval) else None
                    ablation.alter = _alteration(
                        jobs[chunk], layer, seed, squares[chunk, batch], sequences, batch, blocks
                    )
                elif isinstance(part, Replacement):
                    ablation.part = part.of_rows(batch)
                with hooks_on(view.model, intact.points, ablation.hooks()):
                    scores.add(batch, intact.replay(layer, batch, len(chosen)))
            values[chunk] = scores.result()
    by_head = values.view(len(heads), draws + 1, n).numpy()
    score_rms = squares.view(len(heads), draws + 1, n)[:, 0].mean(-1).sqrt().numpy()
    return LayerEffects(by_head[:, 0], score_rms, by_head[:, 1:])


def _alteration(
    jobs: list[tuple[int, int]],
    layer: int,
    seed: int,
    squares: Tensor,
    sequences: ScoredSequences,
    batch: slice,
    blocks: BlockPlaces | None,
) -> Callable[[Removal], Tensor]:
    """Record the mean square of each removed part, [jobs, sequences], and substitute random parts for control jobs."""
    random = [index for index, (_, draw) in enumerate(jobs) if draw >= 0]

    def alter(removal: Removal) -> Tensor:
        removal = unpadded(removal, sequences, batch)
        assert removal.allowed is not None
        squares.copy_(root_mean_square(removal.difference, removal.allowed).square().T.cpu())
        if not random:
            return removal.difference
        drawn, replaced = [jobs[index] for index in random], removal.difference.clone()
        if blocks is not None:
            seeds = [[seed, layer, head, draw] for head, draw in drawn]
            replaced[:, random] = blocks.shuffled(removal.difference[:, random], seeds)
            return replaced
        replaced[:, random] = random_difference(removal, random, random_frames(seed, layer, drawn, removal.d_head))
        return replaced

    return alter


def random_frames(seed: int, layer: int, jobs: list[tuple[int, int]], d_head: int) -> Float[Tensor, "jobs d d"]:
    """Draw a Haar-random orthogonal matrix for each (head, draw), each from a generator of its own."""
    return torch.stack([haar_frame(d_head, d_head, [seed, layer, head, draw]) for head, draw in jobs])


def random_difference(
    removal: Removal, which: list[int], frames: Float[Tensor, "jobs d d"]
) -> Float[Tensor, "batch jobs pos pos"]:
    """Compute `q O k^T` of bias-free queries and keys before rotation, O orthogonal, scaled to the RMS of `removal`.

    The RMS is over the unmasked pairs of each sequence. `which` are indices among the heads of `removal`.
    """
    assert removal.query is not None
    assert removal.key is not None
    assert removal.allowed is not None
    query, key = removal.query.content[:, which], removal.key.content[:, which]
    allowed = removal.allowed if removal.allowed.ndim == 2 else removal.allowed[:, which]
    drawn = query @ frames.to(query) @ key.mT
    removed_rms, drawn_rms = (root_mean_square(scores, allowed) for scores in (removal.difference[:, which], drawn))
    return drawn * (removed_rms / drawn_rms.clamp_min(torch.finfo(drawn_rms.dtype).tiny))[..., None, None]


def root_mean_square(
    scores: Float[Tensor, "batch heads pos pos"], allowed: Bool[Tensor, "*batch pos pos"]
) -> Float[Tensor, "batch heads"]:
    """Root mean square over the allowed pairs of each sequence."""
    square = (scores * allowed).square().sum((-2, -1))
    return (square / allowed.sum((-2, -1))).sqrt()
