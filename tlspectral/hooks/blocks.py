"""The content, the position and their interaction in a head's scores of keys in blocks of a prompt.

A block of width w holds a content k and stands at a place j; its tokens have offsets o = 0 .. w - 1. For one query and
one offset, the score of content k at place j is a two-way table L[k, j]: the key of content k as it is in this run,
rotated to its token of place j. With means over contents and over places,

    mu = mean_kj L     content_k = mean_j L[k, j] - mu     position_j = mean_k L[k, j] - mu
    interaction_kj = L[k, j] - mu - content_k - position_j

so that L = mu + content + position + interaction, and squares over the table add up. A score is a product c_k . p_j of
a key and a rotation, so that

    content_k = (c_k - c) . p     position_j = c . (p_j - p)     interaction_kj = (c_k - c) . (p_j - p)

with c the mean key and p the mean rotation over the blocks: no table is formed. Source: "Decoupling Positional and
Symbolic Attention Behavior" (PS) conjectures in section 6 that any head decomposes into heads that are purely
positional or purely symbolic; the interaction is what such a sum of two lacks.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.hooks.parts import Part, Projection, Rotation, rotated_products
from tlspectral.models.attention import AttentionLayer
from tlspectral.rotary import in_float64


@dataclass(frozen=True)
class BlockPlaces:
    """Where the blocks of a prompt stand: the first position of each, and the tokens in any of them."""

    starts: tuple[int, ...]
    width: int

    @property
    def stop(self) -> int:
        """First position behind the last block."""
        return self.starts[-1] + self.width

    def tokens(self) -> Int[Tensor, "blocks width"]:
        """Positions of the tokens of every block."""
        return torch.tensor(self.starts)[:, None] + torch.arange(self.width)

    def split(self, x: Float[Tensor, "*batch pos columns"]) -> tuple[Tensor, Tensor]:
        """Return x with the tokens of blocks replaced by their mean over blocks, and by what is left of it.

        Tokens outside the blocks keep their rows in both.
        """
        at = self.tokens().to(x.device)
        of_blocks = x[..., at, :]  # *batch blocks width columns
        left = centred(of_blocks, dim=-3)
        averaged, deviating = x.clone(), x.clone()
        averaged[..., at, :] = (of_blocks.narrow(-3, 0, 1) - left.narrow(-3, 0, 1)).expand_as(of_blocks)
        deviating[..., at, :] = left
        return averaged, deviating

    def read(self, allowed: Bool[Tensor, "*batch pos pos"]) -> Bool[Tensor, "*batch pos pos"]:
        """Limit pairs of tokens to queries behind the blocks and keys in them.

        Raises ValueError for a run without a query behind the blocks, with padding in front, or with a window that
        hides a block from such a query.
        """
        n = allowed.shape[-1]
        if n <= self.stop:
            raise ValueError(f"the blocks end at token {self.stop}, and this run has {n}: no query stands behind them")
        seen = allowed[..., self.stop :, self.starts[0] : self.stop]
        if not bool(allowed[..., 1, 0].all() & seen.all()):
            raise ValueError(
                "a query behind the blocks does not see all of them: blocks are counted from the first token of a run, "
                "so pad at its end; and leave out layers whose window is shorter than the blocks"
            )
        inside = torch.zeros(n, n, dtype=torch.bool, device=allowed.device)
        inside[self.stop :, self.tokens().flatten().to(allowed.device)] = True
        return allowed & inside

    def shuffled(
        self, difference: Float[Tensor, "batch jobs pos pos"], seeds: list[list[int]]
    ) -> Float[Tensor, "batch jobs pos pos"]:
        """Move what is removed from each block to another one, by a random cycle through all blocks for each job.

        Every query then loses the same numbers from other blocks: a random part of equal size.
        """
        moved, at = difference.clone(), self.tokens().to(difference.device)
        for job, seed in enumerate(seeds):
            cycle = torch.from_numpy(np.random.default_rng(seed).permutation(len(self.starts))).to(at.device)
            moved[:, job][..., at[cycle]] = difference[:, job][..., at[cycle.roll(1)]]
        return moved


def block_places(model: Any, blocks: Any) -> BlockPlaces:
    """Return where the blocks of a `BlockPrompt` stand. Raises ValueError for blocks of unequal length."""
    if not hasattr(blocks, "tokenized"):
        raise ValueError(f"blocks is a BlockPrompt, whose blocks are the keys; found {type(blocks).__name__}")
    spans = blocks.tokenized(model).spans()
    widths = sorted({stop - start for start, stop in spans})
    if len(widths) > 1:
        raise ValueError(
            f"blocks of {widths[0]} to {widths[-1]} tokens: content and position are taken apart token by token, so "
            "give blocks of equal length"
        )
    return BlockPlaces(tuple(start for start, _ in spans), widths[0])


def block_removal(
    part: Part,
    query: Projection,
    key: Projection,
    rotation: Rotation | None,
    layer: AttentionLayer,
    heads: list[int],
    places: BlockPlaces,
) -> Float[Tensor, "batch heads pos pos"]:
    """Return what removing a part adds to the scaled scores, before a softcap; of use for the pairs of `read` alone.

    Biases are in it. Non-rotary columns do not depend on the place, so they are content; ALiBi is position.
    """
    mean_keys, key_deviations = places.split(key.whole)
    mean_rotation = place_deviations = None
    if rotation is not None:
        tables = zip(places.split(rotation.cos), places.split(rotation.sin), strict=True)
        mean_rotation, place_deviations = (replace(rotation, cos=cos, sin=sin) for cos, sin in tables)
    if part == "content":
        return rotated_products(query.whole, key_deviations, mean_rotation, 1).mul_(-layer.score_scale)
    keys = mean_keys if part == "position" else key_deviations
    if place_deviations is None:
        removed = torch.zeros_like(query.whole @ keys.mT)
    else:
        removed = place_deviations.product(query.whole, keys, direction=1)
    removed = removed.mul_(-layer.score_scale)
    if part == "position" and layer.alibi is not None:
        bias = in_float64(layer.alibi.bias(torch.arange(keys.shape[-2]))[heads])
        removed = removed - places.split(bias[..., None])[1].mT.to(removed)
    return removed


def centred(values: Tensor, dim: int) -> Tensor:
    """Centre the values. The first value is subtracted beforehand, so that equal values give exactly 0."""
    from_first = values - values.narrow(dim, 0, min(1, values.shape[dim]))
    return from_first - from_first.mean(dim, keepdim=True)
