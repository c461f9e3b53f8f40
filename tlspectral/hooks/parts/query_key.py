"""Parts of a head's query-key operator: M_S, M_A, Im(M_t), and the contribution of some rotary pairs.

With C and D of `HeadScores`, even and odd in the offset, removing a part changes a score S by

    Symmetric       -(C + C^T)/2     content then acts by M_A
    Antisymmetric   -(C - C^T)/2     content then acts by M_S
    RopePhase       -D               Im(M_t) is gone
    Band            less what these rotary pairs contribute

and the first three sum to -S. Under rotary positions C at distance D is `sum_t Re(M_t) cos(theta_t D)` and what does
not rotate, so the first two are parts of the operator as it acts at each distance. `static=True` takes C at offset 0 in
place of C: the parts of the one matrix M. Source: "Fingerprint, Not Blueprint", sections 5, 8 and 10, which removes M_S
and M_A on GPT-2, where nothing rotates and both are one.
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
from tlspectral.hooks.parts.part import Part
from tlspectral.models.attention.head_scores import HeadScores
from tlspectral.models.reading.view import AttentionView

BANDS = ("high", "middle", "low")
"""Thirds of a head's rotary pairs, from the fastest to the slowest."""


class QueryKeyPart(Part, ABC):
    """A part of the product of a head's queries and keys. A part of your own is a subclass with a `name` and `of`.

    `frequencies` are the rotary pairs that it is limited to, None for all; `include_bias` lets it act on bias terms as
    well, as the operator on tokens with a 1 appended.
    """

    frequencies: Any = None
    include_bias: bool = False

    @property
    def settings(self) -> Mapping[str, Any]:
        """The frequencies, and whether biases are in it, where they are not the default."""
        given = self.frequencies
        named = {} if given is None else {"frequencies": given if isinstance(given, str) else list(given)}
        return named | ({"include_bias": True} if self.include_bias else {})

    def on(self, view: AttentionView, by_layer: dict[int, list[int]]) -> Mapping[int, Part]:
        """Bind the part to layers. Raises UnsupportedArchitecture, and ValueError for pairs that a layer lacks."""
        bound = super().on(view, by_layer)
        if not self.rotary or self.frequencies is None:
            return bound
        return {layer: part for layer, part in bound.items() if self._any_pair(layer, view.rotary(layer))}

    @abstractmethod
    def of(
        self, scores: HeadScores, pairs: Bool[Tensor, "*of_heads pairs"] | None
    ) -> Float[Tensor, "batch heads pos pos"]:
        """Return the part of the scaled scores that is removed, a score for every pair of tokens.

        Args:
            scores: queries, keys and their products for this run, `HeadScores`.
            pairs: mask of the rotary pairs in `frequencies`; None without `frequencies` or rotary positions.

        Returns:
            A floating-point tensor on the device of the scores. It is never written to. It may be infinite only where
            the model masks the pair of tokens; such values are ignored.
        """

    def chosen_pairs(self, scores: HeadScores) -> Bool[Tensor, "*of_heads pairs"] | None:
        """Return the rotary pairs in `frequencies` as a mask; None without `frequencies` or rotary positions."""
        geometry = scores.layer.rotary
        return None if geometry is None or self.frequencies is None else self.pairs_of(geometry, scores.heads)

    def pairs_of(self, geometry: RotaryGeometry, heads: list[int]) -> Bool[Tensor, "*of_heads pairs"]:
        """Return the chosen pairs as a mask; [heads, pairs] where they differ by head. Raises as `pair_mask`."""
        return pair_mask(self.frequencies, geometry.n_pairs)

    def _any_pair(self, layer: int, geometry: RotaryGeometry | None) -> bool:
        assert geometry is not None
        try:
            return bool(self.pairs_of(geometry, [0]).any())
        except ValueError as error:
            raise ValueError(f"layer {layer}: {error}") from error


@dataclass(frozen=True, eq=False, repr=False)
class SymmetryPart(QueryKeyPart):
    """M_S or M_A: the half of the content C that keeps or changes its sign when the two tokens are exchanged."""

    include_bias: bool = False
    static: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.static:
            object.__setattr__(self, "name", f"{self.name}_static")

    def of(self, scores: HeadScores, pairs: Bool[Tensor, "pairs"] | None) -> Float[Tensor, "batch heads pos pos"]:
        """Return (C + C^T)/2 or (C - C^T)/2, scaled; `static` with the C of the two tokens at offset 0."""
        return self._half(scores.at_one_position() if self.static else scores)

    @abstractmethod
    def _half(self, scores: HeadScores) -> Float[Tensor, "batch heads pos pos"]:
        """Return the half of the scaled content."""


@dataclass(frozen=True, eq=False, repr=False)
class Symmetric(SymmetryPart):
    """M_S, the symmetric part of the content: (C + C^T)/2, what the pair with the tokens exchanged has too.

    With rotary positions, C at distance D is `sum_t Re(M_t) cos(theta_t D)` and what does not rotate. So how the score
    changes with distance, whichever token comes first, is in it, and `Symmetric`, `Antisymmetric` and `RopePhase` sum
    to the score. Only at distance 0 is it (M + M^T)/2 of the matrix M. `static=True` removes that at every distance:
    `S -> S - (C0 + C0^T)/2`, C0 being the C of the two tokens at offset 0, with factors on cos and sin, gain and phase.
    The static parts and `RopePhase` do not sum to the score, and where C at a distance is not C0, removing one can add
    what it should take away. Without rotary positions both forms are one. "Fingerprint, Not Blueprint" removes M_S and
    M_A on GPT-2, so neither form is its M_S on a rotary model.

    Attributes:
        include_bias: whether it acts on bias terms as well, as the operator on tokens with a 1 appended.
        static: whether it is the part of M at distance 0; then its name is `"symmetric_static"`.

    >>> import tlspectral as tls
    >>> tls.parts.Symmetric(include_bias=True)
    Symmetric(include_bias=True, static=False)
    >>> tls.parts.Symmetric(static=True).name
    'symmetric_static'
    """

    name = "symmetric"

    def _half(self, scores: HeadScores) -> Float[Tensor, "batch heads pos pos"]:
        return scores.symmetric(include_bias=self.include_bias)


@dataclass(frozen=True, eq=False, repr=False)
class Antisymmetric(SymmetryPart):
    """M_A, the antisymmetric part of the content: (C - C^T)/2, what changes its sign when the tokens are exchanged.

    Else as `Symmetric`: with rotary positions the part as it acts at each distance, with `static=True` the part of
    M at distance 0, `S -> S - (C0 - C0^T)/2`, under the name `"antisymmetric_static"`.

    Attributes:
        include_bias: whether it acts on bias terms as well, as the operator on tokens with a 1 appended.
        static: whether it is the part of M at distance 0.

    >>> import tlspectral as tls
    >>> tls.parts.Antisymmetric()
    Antisymmetric(include_bias=False, static=False)
    """

    name = "antisymmetric"

    def _half(self, scores: HeadScores) -> Float[Tensor, "batch heads pos pos"]:
        return scores.antisymmetric(include_bias=self.include_bias)


@dataclass(frozen=True, eq=False, repr=False)
class RopePhase(QueryKeyPart):
    """Im(M_t), the part of a score that is odd in the offset.

    Attributes:
        frequencies: indices of rotary pairs (0 is the model's first) or a boolean mask over them, [pairs]; None is all.
            None of them, `[]`, removes nothing.
        include_bias: whether it acts on bias terms as well.

    Raises:
        ValueError: when a model is given, pairs that a layer lacks.
        UnsupportedArchitecture: when a model is given, a layer without rotary positions.

    >>> import tlspectral as tls
    >>> tls.parts.RopePhase(frequencies=range(2))
    RopePhase(frequencies=(0, 1), include_bias=False)
    """

    name = "rope_phase"
    rotary = True
    frequencies: Frequencies | None = None
    include_bias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "frequencies", _listed(self.frequencies))

    def of(self, scores: HeadScores, pairs: Bool[Tensor, "pairs"] | None) -> Float[Tensor, "batch heads pos pos"]:
        """Return D, scaled."""
        return scores.phase(pairs, include_bias=self.include_bias)


@dataclass(frozen=True, eq=False, repr=False)
class Band(QueryKeyPart):
    """Everything that some rotary pairs contribute to a score, bias terms apart.

    A sweep compares it with random sets of pairs whose contribution has its RMS.

    Attributes:
        frequencies: indices of rotary pairs (0 is the model's first) or a boolean mask over them, [pairs]; or "high",
            "middle" or "low", a third of each head's own pairs from the fastest to the slowest.

    Raises:
        ValueError: None in place of frequencies, or another word; when a model is given, a third of fewer than three
            pairs, or pairs that a layer lacks.
        UnsupportedArchitecture: when a model is given, a layer without rotary positions.

    >>> import tlspectral as tls
    >>> tls.parts.Band([0, 3])
    Band(frequencies=(0, 3))
    >>> tls.parts.Band("low")
    Band(frequencies='low')
    """

    name = "rotary_band"
    rotary = True
    frequencies: Frequencies

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frequencies is None:
            raise ValueError("Band needs frequencies: the rotary pairs whose contribution is dropped")
        if not isinstance(self.frequencies, str):
            object.__setattr__(self, "frequencies", _listed(self.frequencies))
        elif self.frequencies not in BANDS:
            raise ValueError(f"a band is one of {', '.join(map(repr, BANDS))}, or its pairs; not {self.frequencies!r}")

    def of(
        self, scores: HeadScores, pairs: Bool[Tensor, "*of_heads pairs"] | None
    ) -> Float[Tensor, "batch heads pos pos"]:
        """Return what the pairs contribute, scaled."""
        return scores.of_pairs(pairs)

    def control_pairs(
        self, geometry: RotaryGeometry | None, heads: list[int]
    ) -> tuple[Bool[Tensor, "heads pairs"], list[int]]:
        """Return the pairs of each head, and the number of a third, so that thirds have draws of their own."""
        assert geometry is not None
        named = [BANDS.index(self.frequencies)] if isinstance(self.frequencies, str) else []
        return self.pairs_of(geometry, heads).expand(len(heads), -1), named

    def pairs_of(self, geometry: RotaryGeometry, heads: list[int]) -> Bool[Tensor, "*of_heads pairs"]:
        """Return the chosen pairs as a mask; [heads, pairs] for a third of pairs that each head has of its own."""
        if not isinstance(self.frequencies, str):
            return super().pairs_of(geometry, heads)
        if geometry.n_pairs < len(BANDS):
            raise ValueError(f"{geometry.n_pairs} rotary frequencies do not make three bands")
        from_fast = geometry.of_heads(heads).theta.abs().argsort(dim=-1, descending=True, stable=True)
        third = from_fast.tensor_split(len(BANDS), dim=-1)[BANDS.index(self.frequencies)]
        return torch.zeros(from_fast.shape, dtype=torch.bool).scatter_(-1, third.cpu(), True)


def _listed(frequencies: Any) -> Any:
    """Return frequencies to be read twice and stored: indices sorted, each once; others are refused with a layer.

    Raises ValueError for a value with two readings.
    """
    require_one_reading(frequencies)
    if isinstance(frequencies, Tensor):  # a mask keeps its shape, which is one of the things it is refused for
        frequencies = (frequencies if frequencies.dtype == torch.bool else frequencies.flatten()).tolist()
    if not isinstance(frequencies, Iterable):
        return None if frequencies is None else (frequencies,)
    given = [one.item() if isinstance(one, np.generic) else one for one in frequencies]
    return tuple(sorted(set(given))) if all(type(one) is int for one in given) else tuple(given)
