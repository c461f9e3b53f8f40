"""`Mode`: singular modes of a head's query-key matrix M, removed from its queries.

The singular value decomposition is M = W_Q W_K^T = sum_k s_k u_k v_k^T, norms folded in. Mode k is gone at every
distance when u_k is taken out of W_Q:

    W_Q <- (I - u_k u_k^T) W_Q

Without rotation this leaves M - s_k u_k v_k^T. Let c = x W_Q be a query without bias. Then x . u_k = c . W_K^T v_k /
s_k, and the query loses (c . W_K^T v_k / s_k) u_k^T W_Q. The residual stream x itself is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor

from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings, whole_number
from tlspectral.hooks.parts.query_key import QueryKeyPart
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.attention.modes import query_key_modes
from tlspectral.models.reading.layer import require_own_projections
from tlspectral.models.reading.view import AttentionView


@dataclass(frozen=True)
class _OfHead:
    """The matrices by which `Mode` acts on one head; c is a query without bias, [d_head].

    Attributes:
        removed: the query loses `c @ removed`.
        triangle: R of the decomposition W_Q = Q R.
        n_removed: number of directions that are removed.
    """

    removed: Float64[Tensor, "d_head d_head"]
    triangle: Float64[Tensor, "d_head d_head"]
    n_removed: int


@checked_settings
@dataclass(frozen=True, eq=False, repr=False)
class Mode(QueryKeyPart):
    """Remove singular modes of M = sum_k s_k u_k v_k^T from a head's queries: W_Q <- (I - u_k u_k^T) W_Q.

    Use it to test which pairs of directions a head compares. Give it to `tls.ablate` or `tls.ablation_sweep`.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> with tls.ablate(model, "L0H3", tls.parts.Mode(0)):
    ...     pass
    >>> tls.parts.Mode(0)
    Mode(modes=(0,), all_but=False)

    M = W_Q W_K^T is the query-key matrix, norms folded in. Its singular value decomposition has values s_k and vectors
    u_k (query) and v_k (key); mode k is the pair u_k, v_k. It is removed at every distance of the two tokens. Biases of
    queries and keys stay, and a query/key norm keeps its scale in the run. The control of a sweep removes as many
    random directions in the column space of W_Q, scaled so that the removed scores have the same RMS.

    Attributes:
        modes: index of a mode, or a list of them; mode 0 has the largest singular value.
        all_but: True removes everything but these modes. Default: False.
        at: position of the queries that lose the modes. Default: None, all positions.
        of_heads: matrices of each head, set by `on`; leave it out.

    Raises:
        ValueError: modes are not whole numbers from 0 on, the list is empty, or a head has fewer modes.
        UnsupportedArchitecture: the model has latent attention.
    """

    name = "mode"
    by_strip = True
    modes: Any
    all_but: bool = False
    of_heads: Mapping[int, _OfHead] | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        listed = self.modes.tolist() if hasattr(self.modes, "tolist") else self.modes  # tensors, arrays, columns
        entries = listed if isinstance(listed, Iterable) and not isinstance(listed, str) else [listed]
        numbers = [whole_number(entry) for entry in entries]
        if not numbers or any(number is None or number < 0 for number in numbers):
            raise ValueError(
                f"modes= must be a whole number from 0 on, or a list of such numbers; found {shown(self.modes)}: for "
                "example modes=[0, 1]"
            )
        object.__setattr__(self, "modes", tuple(sorted({number for number in numbers if number is not None})))

    @property
    def settings(self) -> Mapping[str, Any]:
        """Dict of this part for the attrs of tables: `modes`, and `all_but` if it is True."""
        return {"modes": list(self.modes)} | ({"all_but": True} if self.all_but else {})

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> dict[int, QueryKeyPart]:
        """Return a dict from layer to a copy of this part with its matrices (`of_heads`) for the heads in `by_layer`.

        `view` is the model, `by_layer` a dict from layer to heads. Raises ValueError for a mode that a head does not
        have, UnsupportedArchitecture for latent attention.
        """
        bound: dict[int, QueryKeyPart] = {}
        for index, heads in by_layer.items():
            require_own_projections(view.raw(index), index, "its queries have no singular modes of their own")
            layer = view.layer(index)
            of_heads = {}
            for head, modes in zip(heads, query_key_modes(layer, heads), strict=True):
                if self.modes[-1] >= len(modes.values):
                    raise ValueError(
                        f"layer {index}, head {head} has modes 0 to {len(modes.values) - 1}; found mode "
                        f"{self.modes[-1]}: give smaller numbers"
                    )
                chosen = list(self.modes)
                removed = modes.read_query[:, chosen] @ modes.written_query[chosen]
                if self.all_but:
                    removed = torch.eye(layer.d_head, dtype=torch.float64) - removed
                n_removed = layer.d_head - len(chosen) if self.all_but else len(chosen)
                of_heads[head] = _OfHead(removed, modes.triangle, n_removed)
            bound[index] = replace(self, of_heads=of_heads)
        return bound

    def of(self, scores: HeadScores, pairs: Bool[Tensor, "pairs"] | None) -> Float[Tensor, "batch heads query key"]:
        """Return the contribution of the modes to the scaled scores, which is removed. `pairs` is not used.

        `scores` are the heads' scores in the run. Only for a part that `on` returned.
        """
        return self._between(scores, torch.stack([self._of(head).removed for head in scores.heads]))

    def drawn(
        self, scores: HeadScores, which: list[int], frames: Float[Tensor, "drawn d d"]
    ) -> Float[Tensor, "batch drawn query key"]:
        """Return random changes of the scaled scores, one for each random control.

        For each control, as many random directions of the columns of W_Q are removed as the part has modes. `scores`
        are the heads' scores in the run, `which` are indices into `scores.heads` and `frames` random orthogonal
        matrices, one for each control.
        """
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
        """Return the matrices of a head as `_OfHead`. Only for a part that `on` returned, which knows its heads."""
        assert self.of_heads is not None
        return self.of_heads[head]

    def _between(self, scores: HeadScores, removed: Float64[Tensor, "heads d_head d_head"]) -> Tensor:
        """Return the scores of `queries @ removed` (queries without bias) with the keys of the run.

        `scores` has the queries and keys of the heads, `removed` a matrix per head. The result is scaled, [batch,
        heads, query, key].
        """
        return scores.between(scores.query.content @ removed.to(scores.query.content), scores.key.whole)
