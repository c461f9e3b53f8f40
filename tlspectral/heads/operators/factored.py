"""The query-key and output-value operators of a head, W_Q W_K^T and W_V W_O, kept as thin factors (FP section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from tlspectral.algebra import spectra
from tlspectral.algebra.records import one_line
from tlspectral.algebra.rotary import RotaryGeometry
from tlspectral.algebra.spectra import ThinProduct
from tlspectral.errors import BadHead, UnsupportedArchitecture
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.layer import AttentionLayer, OutputFactors, RawAttention, fold_output
from tlspectral.models.reading.view import AttentionView, one_head
from tlspectral.selection import from_end, head_pair, whole_number


class PhaseFactors(NamedTuple):
    """Real and imaginary part of `M_t = w_q^t conj(w_k^t)^T`, each of rank at most 2."""

    re: ThinProduct
    im: ThinProduct


@dataclass(frozen=True)
class HeadSpectrum:
    """The spectra of one head's M. k = min(d_head, d_model), r = min(2 d_head, d_model); units are M's.

    Attributes:
        singular_values: descending.
        eigenvalues: the ones of M that can be non-zero, largest modulus first.
        eigenvector_condition: cond_2 of the unit eigenvectors of the core, 1 for a normal core.
        symmetric_eigenvalues: of M_S on the joint column space, ascending.
    """

    singular_values: Float64[Tensor, "k"]
    eigenvalues: Complex128[Tensor, "k"]
    eigenvector_condition: float
    symmetric_eigenvalues: Float64[Tensor, "r"]

    __repr__ = one_line


@dataclass(frozen=True)
class QKOperator:
    """M = `w_q @ w_k.T` of one head: input norm and query/key-norm gains folded in, centred under LayerNorm.

    The score of query token i and key token j is `n_i M n_j^T` times the model's scale, plus what lies outside M:
    biases, ALiBi, and under RoPE the rotation between the two positions. No d_model x d_model matrix is built, except
    by `dense`.
    """

    layer: int
    head: int
    w_q: Float64[Tensor, "d_model d_head"]
    w_k: Float64[Tensor, "d_model d_head"]
    rotary: RotaryGeometry | None

    __repr__ = one_line

    def _thin_core(self) -> spectra.ThinCore:
        return spectra.thin_core(self.w_q[None], self.w_k[None])

    def core(self) -> Float64[Tensor, "k k"]:
        """Return a k x k matrix with the non-zero eigenvalues of M, k = min(d_head, d_model)."""
        return self._thin_core().core[0]

    def dense(self) -> Float64[Tensor, "d_model d_model"]:
        """Return M itself, for small models. Everything else works on the factors."""
        return self.w_q @ self.w_k.T

    def symmetric(self) -> ThinProduct:
        """Return M_S = (M + M^T) / 2, the part that scores two tokens alike in both orders."""
        return spectra.symmetric_part(self.w_q, self.w_k)

    def antisymmetric(self) -> ThinProduct:
        """Return M_A = (M - M^T) / 2, the directional part."""
        return spectra.antisymmetric_part(self.w_q, self.w_k)

    def spectrum(self) -> HeadSpectrum:
        """Return singular values, eigenvalues and their conditioning, and the spectrum of M_S (FP section 3)."""
        batch = spectra.spectrum(self._thin_core())
        return HeadSpectrum(
            batch.singular_values[0],
            batch.eigenvalues[0],
            float(batch.eigenvector_condition[0]),
            batch.symmetric_eigenvalues[0],
        )

    def schur_angles(self) -> Float64[np.ndarray, "blocks"]:
        """Return each block's rotation angle in the real Schur form, in radians: (0, pi) for 2 x 2, else 0 or pi."""
        return spectra.schur_angles(self._thin_core())[0]

    def phase(self, t: int) -> PhaseFactors:
        """Return Re and Im of M_t for rotary pair `t` (0 is the model's first pair), as factors (FP section 7).

        Raises:
            UnsupportedArchitecture: the layer has no rotary positions.
            IndexError: no such pair.
        """
        if self.rotary is None:
            raise UnsupportedArchitecture(f"L{self.layer}H{self.head}: the layer has no rotary positions, so no phase")
        if not 0 <= t < self.rotary.n_pairs:
            raise IndexError(
                f"L{self.layer}H{self.head}: pair {t} does not exist; pairs are 0 to {self.rotary.n_pairs - 1}"
            )
        columns = [int(self.rotary.real_index[t]), int(self.rotary.imag_index[t])]
        (a, c), (b, d) = self.w_q[:, columns].T, self.w_k[:, columns].T
        keys = torch.stack([b, d], dim=1)
        return PhaseFactors(
            re=ThinProduct(torch.stack([a, c], dim=1), keys), im=ThinProduct(torch.stack([c, -a], dim=1), keys)
        )


class QKOperators(Sequence[QKOperator]):
    """The operators of a model: `ops[layer, head]`, read from the model when asked for, one layer held at a time.

    As a sequence it runs over all heads, layer by layer.
    """

    def __init__(self, view: AttentionView):
        self._view = view
        self._layer = lru_cache(maxsize=1)(self._read)
        self._n_heads = lru_cache(maxsize=None)(view.n_heads)
        if next(self._in_order(), None) is None:
            _ = view.layers  # raises, and says why there is none

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        return list(self._in_order())

    def _in_order(self) -> Iterator[tuple[int, int]]:
        """Yield layer and head of all heads. A layer is read when its turn comes."""
        for layer in range(self._view.n_layers):
            with suppress(UnsupportedArchitecture):
                yield from ((layer, head) for head in range(self._n_heads(layer)))

    def _read(self, index: int) -> tuple[AttentionLayer, Tensor, Tensor]:
        layer = self._view.layer(index)
        return layer, *layer.operator_factors()

    def __repr__(self) -> str:
        return f"QKOperators({self._view!r}, {len(self)} heads)"

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, key: Any) -> Any:
        """Return one operator by "L0H3" or (layer, head), or by its index among all heads. Raises BadHead."""
        if isinstance(key, slice):
            return [self[i] for i in range(len(self))[key]]
        if not isinstance(key, tuple | str):
            number = whole_number(key)
            if number is None:
                raise BadHead(f"{key!r} names no head: write operators[layer, head], or one number among all heads")
            first = None if number < 0 else next(islice(self._in_order(), number, None), None)
            key = self._pairs[number] if first is None else first
        layer, head = head_pair(key)
        known = from_end(layer, self._view.n_layers)
        index = None if known is None else from_end(head, self._n_heads(known))
        layer, head = one_head(self._view, key) if known is None or index is None else (known, index)  # raises
        record, w_q, w_k = self._layer(layer)
        return QKOperator(layer, head, w_q[head], w_k[head], record.rotary)

    def rotary(self, layer: int) -> RotaryGeometry | None:
        """Return the rotary geometry of a layer, None where it has no rotary positions."""
        return self._view.rotary(layer)


def qk_operators(model: Any) -> QKOperators:
    """Return the norm-folded query-key operators of a model, read lazily.

    >>> import tlspectral as tls
    >>> operators = tls.qk_operators(tls.load_model("tiny-rope"))
    >>> len(operators), operators[0, 3].w_q.shape
    (8, torch.Size([64, 16]))

    Raises:
        UnsupportedArchitecture, BadWeights: a layer cannot be read; the message names it.

    The factors come from the weights; that they reproduce the model's scores is proved by `verify_scores`.
    """
    return QKOperators(attention_view(model))


def ov_operators(model: Any, layer: int) -> list[ThinProduct]:
    """Return `w_v @ w_o` of a layer's heads, acting on rows, in float64; grouped values are repeated per query head.

    `w_v` carries the input norm's gain. Under LayerNorm both sides are centred: the reading side because the norm
    removes the mean, the writing side because every later norm does. TransformerLens's `center_writing_weights` does
    the latter to the weights themselves. A norm behind the attention (Gemma 2 and 3, OLMo 2) is left out.

    Raises:
        BadHead: no such layer.
        UnsupportedArchitecture, BadWeights: the layer cannot be read.
    """
    return output_products(attention_view(model), layer)


def output_products(view: AttentionView, layer: int) -> list[ThinProduct]:
    """Return `ov_operators` of a layer that a measurement has opened."""
    output = centred_output(view.raw(layer), layer)
    groups = len(output.w_o) // len(output.w_v)
    return [ThinProduct(output.w_v[head // groups], w_o.T.contiguous()) for head, w_o in enumerate(output.w_o)]


def centred_output(raw: RawAttention, layer: int) -> OutputFactors:
    """Return value and output factors; under LayerNorm without the mean of what is written, which norms remove."""
    output = fold_output(raw, layer)
    return replace(output, w_o=output.w_o - output.w_o.mean(2, keepdim=True)) if raw.norm.kind == "LN" else output
