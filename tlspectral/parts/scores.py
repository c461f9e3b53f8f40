"""The parts of a head's score, as full matrices over pairs of tokens, and what removing one subtracts.

With `S+` the score of the bilinear form with the model's own rotations and `S-` the same with every angle negated,

    C = (S+ + S-) / 2     content: Re(M_t) and columns that do not turn, even in the offset
    D = (S+ - S-) / 2     phase: Im(M_t), odd in the offset

so that the symmetric part (C + C^T)/2, the antisymmetric part (C - C^T)/2 and D sum to the score. No loop over
frequencies and no d_model x d_model matrix ("Fingerprint, Not Blueprint", sections 5, 8 and 10).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tlspectral.models.attention import QueryKeyNorm
from tlspectral.rotary import RotaryGeometry, times_phase, widened, with_gain_and_phase


@dataclass(frozen=True)
class Projection:
    """Queries or keys of some heads, as they enter the score before any rotation.

    Attributes:
        whole: with bias.
        content: without bias, what M acts on.
        token_scale: 1/rms of a query/key norm per token, None without one.
    """

    whole: Float[Tensor, "batch heads pos d_head"]
    content: Float[Tensor, "batch heads pos d_head"]
    token_scale: Float[Tensor, "batch heads pos"] | None


def project(
    captured: Float[Tensor, "batch pos heads d_head"],
    bias: Float[Tensor, "heads d_head"],
    norm: QueryKeyNorm | None,
    spectral: RotaryGeometry | None = None,
    *,
    token_scale: Float[Tensor, "batch pos heads"] | None = None,
) -> Projection:
    """Return queries or keys of some heads, from `hook_q` or `hook_k`, after the query/key norm that follows there.

    `spectral`, for queries: the geometry of these heads, whose gain and phase are applied last. `token_scale`: 1/rms of
    these heads, where the norm takes its mean over other heads too.
    """
    whole = widened(captured)
    content = whole - bias.to(whole)
    if norm is not None:
        token_scale = norm.token_scale(whole) if token_scale is None else token_scale
        whole, content = (norm.applied(part, token_scale) for part in (whole, content))
    whole, content = whole.transpose(1, 2), content.transpose(1, 2)
    if spectral is not None:
        whole, content = (with_gain_and_phase(part, spectral) for part in (whole, content))
    return Projection(whole, content, None if token_scale is None else token_scale.transpose(1, 2))


@dataclass(frozen=True)
class Rotation:
    """The rotary pairs of a layer with the cos and sin that a run applied, [(batch,) pos, pairs].

    The tables of a spectral layer are [(batch,) heads, pos, pairs], for the heads of the geometry.
    """

    geometry: RotaryGeometry
    cos: Float[Tensor, "*batch pos pairs"]
    sin: Float[Tensor, "*batch pos pairs"]

    def product(
        self,
        queries: Float[Tensor, "batch heads pos d_head"],
        keys: Float[Tensor, "batch heads pos d_head"],
        *,
        direction: Literal[1, -1],
        pairs: Bool[Tensor, "pairs"] | None = None,
    ) -> Float[Tensor, "batch heads pos pos"]:
        """Return products of rotated queries and keys over the rotary columns alone, of all pairs or of some."""
        mask = slice(None) if pairs is None else pairs
        real, imag = (index.to(queries.device)[mask] for index in (self.geometry.real_index, self.geometry.imag_index))
        cos, sin = (self._per_head(table).to(queries)[..., mask] for table in (self.cos, direction * self.sin))

        def rotated(x: Tensor) -> Tensor:
            return torch.cat(times_phase(x[..., real], x[..., imag], cos, sin), dim=-1)

        return rotated(queries) @ rotated(keys).mT

    def of_heads(self, heads: list[int]) -> "Rotation":
        """Return the rotation of some query heads of a spectral layer, in the given order; an ordinary one as it is."""
        if not self.geometry.per_head:
            return self
        return Rotation(self.geometry.of_heads(heads), self.cos[..., heads, :, :], self.sin[..., heads, :, :])

    def _per_head(self, table: Tensor) -> Tensor:
        return table[:, None] if table.ndim == 3 and not self.geometry.per_head else table

    def still_columns(self) -> Int[Tensor, "columns"]:
        """Return the non-rotary columns of the head, which are in no pair."""
        non_rotary = torch.ones(self.geometry.d_head, dtype=torch.bool)
        non_rotary[self.geometry.real_index] = False
        non_rotary[self.geometry.imag_index] = False
        return non_rotary.nonzero().flatten()


@dataclass(frozen=True)
class Removal:
    """The part that is removed from the chosen heads of a layer, for code that records or replaces it.

    Attributes:
        difference: what is added to the scaled scores (before a softcap), [batch, heads, pos, pos]; for `"output"` to
            z, [batch, heads, pos, d_head].
        allowed: pairs of tokens that the model does not mask; None for `"output"`.
        query, key: projections that the scores are products of; None for `"output"`.
        rotation: rotation of these two; None for `"output"` and without rotary positions.
    """

    difference: Float[Tensor, "batch heads pos width"]
    allowed: Bool[Tensor, "*batch pos pos"] | None
    query: Projection | None
    key: Projection | None
    rotation: Rotation | None

    @property
    def d_head(self) -> int:
        """Columns of a head."""
        return self.difference.shape[-1] if self.query is None else self.query.content.shape[-1]


def whole_scores(
    query: Projection, key: Projection, rotation: Rotation | None, score_scale: float
) -> Float[Tensor, "batch heads pos pos"]:
    """Return scaled scores with biases, before softcap and mask."""
    return score_scale * rotated_products(query.whole, key.whole, rotation, 1)


def rotated_products(queries: Tensor, keys: Tensor, rotation: Rotation | None, direction: Literal[1, -1]) -> Tensor:
    """Return unscaled products of queries and keys, non-rotary columns among them."""
    if rotation is None:
        return queries @ keys.mT
    non_rotary = rotation.still_columns().to(queries.device)
    product = rotation.product(queries, keys, direction=direction)
    return product + queries[..., non_rotary] @ keys[..., non_rotary].mT if len(non_rotary) else product
