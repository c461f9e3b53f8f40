"""Parts of a head's attention score that queries and keys give: M_S, M_A, Im(M_t), and bands of rotary frequencies.

A scaled score without biases is S = C + D. C is even in the distance of the two tokens, D is odd (`HeadScores`).
C^T exchanges the two tokens. Removing a part changes S by

    Symmetric       -(C + C^T)/2     M_S at each distance
    Antisymmetric   -(C - C^T)/2     M_A at each distance
    RopePhase       -D               Im(M_t)
    Band            minus the contribution of some rotary pairs

The first three changes add up to -S. With `static=True`, C at distance 0 takes the place of C: this gives the parts of
the matrix M alone. Source: "Fingerprint, Not Blueprint", sections 5, 8 and 10. That paper removes M_S and M_A on GPT-2,
where nothing rotates and both forms are equal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tlspectral.algebra.rotary import Frequencies, RotaryGeometry, pair_mask, require_one_reading
from tlspectral.errors import shown
from tlspectral.errors.settings import checked_settings
from tlspectral.hooks.parts.part import Part
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading.view import AttentionView

BANDS = ("high", "middle", "low")
"""Names of the thirds of a head's rotary pairs, from the fastest to the slowest."""


class QueryKeyPart(Part, ABC):
    """Base class of parts that take something from the scores of queries and keys.

    A part of your own is a subclass with a `name` and a method `of(scores, pairs)`. The method returns the scores that
    are removed, [batch, heads, query, key], for example with `scores.whole()` or `scores.phase(pairs)`. `pairs` is a
    boolean mask of the rotary pairs in `frequencies`, or None for all. `frequencies` limits nothing unless `of` passes
    `pairs` on.

    >>> import tlspectral as tls
    >>> class WholeScore(tls.parts.QueryKeyPart):
    ...     name = "whole_score"
    ...
    ...     def of(self, scores, pairs):
    ...         return scores.whole()
    >>> with tls.ablate(tls.load_model("tiny-rope"), "L0H3", WholeScore()):
    ...     pass

    Attributes:
        frequencies: rotary pairs that the part is limited to. Default: None, all pairs.
        include_bias: True also removes terms with biases of queries and keys. Default: False.
        at: position of the queries that lose the part. Default: None, all positions.

    `tls.ablate` raises ValueError if `of` returns another shape, or NaN. More: docs/write_your_own.md
    """

    frequencies: Any = None
    include_bias: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """Dict of this part for the attrs of tables: `frequencies` and `include_bias`, without defaults."""
        pairs = self.frequencies
        named = {} if pairs is None else {"frequencies": pairs if isinstance(pairs, str) else list(pairs)}
        return named | ({"include_bias": True} if self.include_bias else {})

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> Mapping[int, Part]:
        """Return a dict from layer to this part itself, without layers where `frequencies` selects no rotary pair.

        `view` is the model, `by_layer` a dict from layer to heads. Raises UnsupportedArchitecture for a layer without
        rotary positions if the part needs them, and ValueError for rotary pairs that a layer does not have.
        """
        bound = super().on(view, by_layer)
        if not self.rotary or self.frequencies is None:
            return bound
        return {layer: part for layer, part in bound.items() if self._any_pair(layer, view.rotary(layer))}

    @abstractmethod
    def of(
        self, scores: HeadScores, pairs: Bool[Tensor, "*of_heads pairs"] | None
    ) -> Float[Tensor, "batch heads query key"]:
        """Return the part of the scaled scores that is removed, [batch, heads, query, key].

        Args:
            scores: queries, keys and their products for the ablated heads in this run.
            pairs: mask of the rotary pairs in `frequencies`; None without `frequencies` or rotary positions.

        Returns:
            A floating-point tensor on the device of the scores. It is not changed. Infinite numbers are ignored where
            the model masks the key and refused elsewhere.
        """

    def chosen_pairs(self, scores: HeadScores) -> Bool[Tensor, "*of_heads pairs"] | None:
        """Return a mask of the rotary pairs in `frequencies`; None without `frequencies` or rotary positions.

        `scores` are the heads' scores in the run, whose layer has the pairs.
        """
        geometry = scores.layer.rotary
        return None if geometry is None or self.frequencies is None else self.pairs_of(geometry, scores.heads)

    def pairs_of(self, geometry: RotaryGeometry, heads: list[int]) -> Bool[Tensor, "*of_heads pairs"]:
        """Return a mask of the chosen rotary pairs, [pairs], or [heads, pairs] if the choice differs between heads.

        `geometry` has the rotary pairs of the layer, `heads` are its heads. Raises ValueError for pairs that the layer
        does not have, or a mask of another length.
        """
        return pair_mask(self.frequencies, geometry.n_pairs)

    def _any_pair(self, layer: int, geometry: RotaryGeometry | None) -> bool:
        """Return True if `frequencies` selects any rotary pair of a layer.

        `geometry` has the rotary pairs of the layer, or is None without rotary positions. Raises ValueError for pairs
        that the layer lacks.
        """
        assert geometry is not None
        try:
            return bool(self.pairs_of(geometry, [0]).any())
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error


@dataclass(frozen=True, eq=False, repr=False)
class SymmetryPart(QueryKeyPart):
    """Base class of `Symmetric` and `Antisymmetric`: halves of C, the part of a score that is even in the distance.

    Attributes:
        include_bias: True also removes terms with biases of queries and keys.
        static: True takes C at distance 0 and removes it at every distance.
    """

    include_bias: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.static:
            object.__setattr__(self, "name", f"{self.name}_static")

    def of(self, scores: HeadScores, pairs: Bool[Tensor, "pairs"] | None) -> Float[Tensor, "batch heads query key"]:
        """Return M_S or M_A of the scaled scores: (C + C^T)/2 or (C - C^T)/2. `pairs` is not used.

        `scores` are the heads' scores in the run. C is the part of a score that is even in the distance of the two
        tokens. With `static`, C is taken at distance 0.
        """
        return self._half(scores.at_one_position() if self.static else scores)

    @abstractmethod
    def _half(self, scores: HeadScores) -> Float[Tensor, "batch heads query key"]:
        """Return (C + C^T)/2 for M_S or (C - C^T)/2 for M_A.

        C is the part of the scaled scores that is even in the distance of the two tokens.
        """


@checked_settings
@dataclass(frozen=True, eq=False, repr=False)
class Symmetric(SymmetryPart):
    """Remove M_S, the symmetric part of a head's score: (C_ij + C_ji)/2 for query i and key j, with C as below.

    Use it in `tls.ablate` or `tls.ablation_sweep` to test whether a head needs the part of its score that does not
    change when the two tokens are exchanged.

    >>> import tlspectral as tls
    >>> tls.parts.Symmetric(include_bias=True)
    Symmetric(include_bias=True, static=False)
    >>> tls.parts.Symmetric(static=True).name
    'symmetric_static'

        with tls.ablate(model, "L5H1", tls.parts.Symmetric()): ...  # or "symmetric"

    C_ij = sum_t cos(theta_t (i - j)) x_i Re(M_t) x_j^T + x_i M_rest x_j^T, for query i and key j with streams x_i and
    x_j. M_t is the head's complex matrix for rotary frequency theta_t, and M_rest belongs to columns that do not
    rotate. C_ji exchanges the two tokens. `Symmetric`, `Antisymmetric` and `RopePhase` add up to the score without
    biases.

    Attributes:
        include_bias: True also removes the symmetric part of terms with biases of queries and keys. Default: False.
        static: True takes C at distance 0, so the part of M = W_Q W_K^T, and removes it at every distance. The name is
            then "symmetric_static". Default: False. Static parts do not add up to the score, so removing one can add to
            a score. Without rotary positions both forms are equal.
        at: position of the queries that lose the part. Default: None, all positions.

    No errors of its own; `tls.ablate` raises UnsupportedArchitecture for a layer that cannot be read.

    "Fingerprint, Not Blueprint" removes M_S on GPT-2, which has no rotary positions. On a rotary model neither form is
    that paper's M_S. More: docs/concepts.md
    """

    name = "symmetric"
    by_strip = True

    def _half(self, scores: HeadScores) -> Float[Tensor, "batch heads query key"]:
        return scores.symmetric(include_bias=self.include_bias)


@checked_settings
@dataclass(frozen=True, eq=False, repr=False)
class Antisymmetric(SymmetryPart):
    """Remove M_A, the antisymmetric part of a head's score: (C_ij - C_ji)/2 for query i and key j, with C as below.

    Use it in `tls.ablate` or `tls.ablation_sweep` to test whether a head needs the part of its score that changes sign
    when the two tokens are exchanged.

    >>> import tlspectral as tls
    >>> tls.parts.Antisymmetric()
    Antisymmetric(include_bias=False, static=False)

        with tls.ablate(model, "L5H1", tls.parts.Antisymmetric()): ...  # or "antisymmetric"

    C_ij = sum_t cos(theta_t (i - j)) x_i Re(M_t) x_j^T + x_i M_rest x_j^T is the part of the score of query i and key j
    that is even in their distance. x_i and x_j are their streams, M_t is the head's complex matrix for rotary frequency
    theta_t, and M_rest belongs to columns that do not rotate. C_ji exchanges the two tokens.

    Attributes:
        include_bias: True also removes the antisymmetric part of terms with biases. Default: False.
        static: True takes C at distance 0, so the part of M = W_Q W_K^T, and removes it at every distance. The name is
            then "antisymmetric_static". Default: False. Static parts do not add up to the score.
        at: position of the queries that lose the part. Default: None, all positions.

    No errors of its own; `tls.ablate` raises UnsupportedArchitecture for a layer that cannot be read. "Fingerprint, Not
    Blueprint" removes M_A on GPT-2, which has no rotary positions. More: docs/concepts.md
    """

    name = "antisymmetric"
    by_strip = True

    def _half(self, scores: HeadScores) -> Float[Tensor, "batch heads query key"]:
        return scores.antisymmetric(include_bias=self.include_bias)


@checked_settings
@dataclass(frozen=True, eq=False, repr=False)
class RopePhase(QueryKeyPart):
    """Remove Im(M_t), the phase: - sum_t sin(theta_t (i - j)) x_i Im(M_t) x_j^T, the odd part of a head's score.

    Use it in `tls.ablate` or `tls.ablation_sweep`; without settings its name "rope_phase" means the same.

    >>> import tlspectral as tls
    >>> tls.parts.RopePhase(frequencies=range(2))
    RopePhase(frequencies=(0, 1), include_bias=False)

        with tls.ablate(model, "L5H1", tls.parts.RopePhase(frequencies=[0, 1])): ...

    M_t is the head's complex matrix for rotary frequency theta_t, x_i the stream at query i, x_j the stream at key j.
    This part of the score changes its sign with the distance i - j: it tells which token comes first.

    Attributes:
        frequencies: indices of rotary pairs (0 is the model's first) or a boolean mask over them, [pairs]. Default:
            None, all pairs. An empty list removes nothing.
        include_bias: True also removes the phase of terms with biases of queries and keys. Default: False.
        at: position of the queries that lose the part. Default: None, all positions.

    Raises:
        ValueError: a layer does not have these rotary pairs (known once a model is given).
        UnsupportedArchitecture: a layer has no rotary positions.

    More: docs/concepts.md
    """

    name = "rope_phase"
    by_strip = True
    rotary = True
    frequencies: Frequencies | None = None
    include_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "frequencies", _listed(self.frequencies))

    def of(self, scores: HeadScores, pairs: Bool[Tensor, "pairs"] | None) -> Float[Tensor, "batch heads query key"]:
        """Return the part of the scaled scores that is odd in the distance of the two tokens.

        `scores` are the heads' scores in the run. `pairs` is a mask of the rotary pairs that count; None: all.
        """
        return scores.phase(pairs, include_bias=self.include_bias)


@dataclass(frozen=True, eq=False, repr=False)
class Band(QueryKeyPart):
    """Remove the contribution of some rotary pairs: sum over t in the band of Re(x_i M_t x_j^T e^(i theta_t (i - j))).

    Use it in `tls.ablate` or `tls.ablation_sweep` to test which rotary frequencies a head needs.

    >>> import tlspectral as tls
    >>> tls.parts.Band([0, 3])
    Band(frequencies=(0, 3))
    >>> tls.parts.Band("low")
    Band(frequencies='low')

        with tls.ablate(model, "L5H1", tls.parts.Band("low")): ...

    M_t is the head's complex matrix for rotary frequency theta_t; x_i and x_j are the streams at query i and key j.
    Terms with biases stay. The control of a sweep removes random sets of pairs whose contribution has the same RMS.

    Attributes:
        frequencies: indices of rotary pairs (0 is the model's first) or a boolean mask over them, [pairs]; or "high",
            "middle" or "low", a third of each head's own pairs, from the fastest to the slowest.
        at: position of the queries that lose the part. Default: None, all positions.

    Raises:
        ValueError: frequencies are None or another word; or, once a model is given, a layer does not have these pairs
            or has fewer than three pairs to divide into thirds.
        UnsupportedArchitecture: a layer has no rotary positions.
    """

    name = "rotary_band"
    by_strip = True
    rotary = True
    frequencies: Frequencies

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frequencies is None:
            raise ValueError("Band needs frequencies: give indices of rotary pairs, or 'high', 'middle' or 'low'")
        if not isinstance(self.frequencies, str):
            object.__setattr__(self, "frequencies", _listed(self.frequencies))
        elif self.frequencies not in BANDS:
            raise ValueError(
                f"Band({shown(self.frequencies)}) is not a band: give {', '.join(map(repr, BANDS))}, or indices of "
                "rotary pairs"
            )

    def of(
        self, scores: HeadScores, pairs: Bool[Tensor, "*of_heads pairs"] | None
    ) -> Float[Tensor, "batch heads query key"]:
        """Return the contribution of the chosen rotary pairs to the scaled scores.

        `scores` are the heads' scores in the run, `pairs` is a mask of the chosen pairs.
        """
        return scores.of_pairs(pairs)

    def control_pairs(
        self, geometry: RotaryGeometry | None, heads: list[int]
    ) -> tuple[Bool[Tensor, "heads pairs"], list[int]]:
        """Return a mask of the rotary pairs of each of the heads, and numbers to add to the seeds of random sets.

        `geometry` has the rotary pairs of the layer. The numbers are a list with the index of a named third ("high" is
        0), or empty for a band given by indices.
        """
        assert geometry is not None
        named = [BANDS.index(self.frequencies)] if isinstance(self.frequencies, str) else []
        return self.pairs_of(geometry, heads).expand(len(heads), -1), named

    def pairs_of(self, geometry: RotaryGeometry, heads: list[int]) -> Bool[Tensor, "*of_heads pairs"]:
        """Return a mask of the chosen rotary pairs: [pairs] for indices, [heads, pairs] for a named third.

        `geometry` has the rotary pairs of the layer, `heads` are its heads. Raises ValueError for pairs that the layer
        does not have, or a third of fewer than three pairs.
        """
        if not isinstance(self.frequencies, str):
            return super().pairs_of(geometry, heads)
        if geometry.n_pairs < len(BANDS):
            raise ValueError(
                f"Band({self.frequencies!r}) needs at least three rotary pairs, and the layer has {geometry.n_pairs}: "
                "give indices of pairs"
            )
        from_fast = geometry.of_heads(heads).theta.abs().argsort(dim=-1, descending=True, stable=True)
        third = from_fast.tensor_split(len(BANDS), dim=-1)[BANDS.index(self.frequencies)]
        return torch.zeros(from_fast.shape, dtype=torch.bool).scatter_(-1, third.cpu(), True)


def _listed(frequencies: Any) -> Any:
    """Return frequencies as a tuple: sorted indices without duplicates, or the entries of a boolean mask in order.

    None stays None. Other values are refused later, with the name of a layer. Raises ValueError for a value with two
    readings, such as an array that may be indices or a mask.
    """
    require_one_reading(frequencies)
    if isinstance(frequencies, Tensor):  # a mask keeps its shape, which is one of the things it is refused for
        frequencies = (frequencies if frequencies.dtype == torch.bool else frequencies.flatten()).tolist()
    if not isinstance(frequencies, Iterable):
        return None if frequencies is None else (frequencies,)
    entries = [entry.item() if isinstance(entry, np.generic) else entry for entry in frequencies]
    return tuple(sorted(set(entries))) if all(type(entry) is int for entry in entries) else tuple(entries)
