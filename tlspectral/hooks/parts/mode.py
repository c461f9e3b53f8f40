"""The singular modes of a head's query-key operator, taken from its queries.

With M = W_Q W_K^T = sum_k s_k u_k v_k^T, norms folded in, mode k is gone at every offset when u_k is taken out of W_Q:

    W_Q <- (I - u_k u_k^T) W_Q

Without rotation that is M - s_k u_k v_k^T. A query without bias is c = x W_Q, and x . u_k = c . W_K^T v_k / s_k. So the
query loses (c . W_K^T v_k / s_k) u_k^T W_Q, and nothing of the residual stream is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tlspectral.hooks.parts.query_key import QueryKeyPart
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.attention.modes import query_key_modes
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection import whole_number


@dataclass(frozen=True)
class _OfHead:
    """What Mode removes from queries of one head without bias, `c @ removed`, and R of W_Q = Q R."""

    removed: Float64[Tensor, "d_head d_head"]
    triangle: Float64[Tensor, "d_head d_head"]
    n_removed: int


@dataclass(frozen=True, eq=False, repr=False)
class Mode(QueryKeyPart):
    """Singular modes of M = W_Q W_K^T: what a head reads of the query along their left vectors.

    `W_Q <- (I - u_k u_k^T) W_Q`: mode k is then gone at every distance. Biases of queries stay, and biases of keys are
    read as before. A query/key norm keeps the factor of the token. A sweep compares it with as many random directions
    of the column space of W_Q, whose scores have the same RMS.

    Attributes:
        modes: index of a mode (0 is the mode of the largest singular value), or several.
        all_but: take away everything but these modes.

    Raises:
        ValueError: no whole numbers from 0 up, or none; when a model is given, a mode that a head does not have.
        UnsupportedArchitecture: when a model is given, latent attention.

    >>> import tlspectral as tls
    >>> tls.parts.Mode(0)
    Mode(modes=(0,), all_but=False)
    """

    name = "mode"
    modes: Any
    all_but: bool = False
    of_heads: Mapping[int, _OfHead] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.modes.tolist() if hasattr(self.modes, "tolist") else self.modes  # tensors, arrays, columns
        given = listed if isinstance(listed, Iterable) and not isinstance(listed, str) else [listed]
        numbers = [whole_number(one) for one in given]
        if not numbers or any(number is None or number < 0 for number in numbers):
            raise ValueError(f"modes are whole numbers from 0 up, an index or a list of them; found {self.modes!r}")
        object.__setattr__(self, "modes", tuple(sorted({number for number in numbers if number is not None})))

    @property
    def settings(self) -> Mapping[str, Any]:
        """The modes, and whether all others are taken."""
        return {"modes": list(self.modes)} | ({"all_but": True} if self.all_but else {})

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, QueryKeyPart]:
        """Bind the part to layers, with what it removes from each head. Raises as the class says."""
        bound: dict[int, QueryKeyPart] = {}
        for index, heads in by_layer.items():
            require_own_projections(view.raw(index), index, "its queries have no singular modes of their own")
            layer = view.layer(index)
            found = {}
            for head, modes in zip(heads, query_key_modes(layer, heads), strict=True):
                if self.modes[-1] >= len(modes.values):
                    raise ValueError(
                        f"layer {index}, head {head} has modes 0 to {len(modes.values) - 1}; found mode "
                        f"{self.modes[-1]}"
                    )
                chosen = list(self.modes)
                removed = modes.read_query[:, chosen] @ modes.written_query[chosen]
                if self.all_but:
                    removed = torch.eye(layer.d_head, dtype=torch.float64) - removed
                n_removed = layer.d_head - len(chosen) if self.all_but else len(chosen)
                found[head] = _OfHead(removed, modes.triangle, n_removed)
            bound[index] = replace(self, of_heads=found)
        return bound

    def of(self, scores: HeadScores, pairs: Bool[Tensor, "pairs"] | None) -> Float[Tensor, "batch heads pos pos"]:
        """Return what the modes contribute to the scaled scores."""
        return self._between(scores, torch.stack([self._of(head).removed for head in scores.heads]))

    def drawn(
        self, scores: HeadScores, which: list[int], frames: Float[Tensor, "drawn d d"]
    ) -> Float[Tensor, "batch drawn pos pos"]:
        """Return what random directions of the column space of W_Q add when they are removed, as many as the modes."""
        drawn = []
        for index, frame in zip(which, frames, strict=True):
            own = scores.of_head(index)
            of_head = self._of(own.heads[0])
            chosen = frame[:, : of_head.n_removed].to(of_head.triangle)
            # W_Q = Q R: a direction Q g of its columns is read from a query c = x Q R as c R^-1 g.
            read = torch.linalg.lstsq(of_head.triangle, chosen).solution @ (chosen.T @ of_head.triangle)
            drawn.append(self._between(own, read[None]))
        return -torch.cat(drawn, dim=1)

    def _of(self, head: int) -> _OfHead:
        assert self.of_heads is not None
        return self.of_heads[head]

    def _between(self, scores: HeadScores, removed: Float64[Tensor, "heads d_head d_head"]) -> Tensor:
        return scores.between(scores.query.content @ removed.to(scores.query.content), scores.key.whole)
