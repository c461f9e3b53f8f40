"""The query-key operator W_Q W_K^T and the output-value operator W_V W_O of a head, kept as thin factors."""

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
from tlspectral.errors.settings import whole_number
from tlspectral.models.reading import attention_view
from tlspectral.models.reading.heads_of_model import one_head
from tlspectral.models.reading.layer import AttentionLayer, OutputFactors, RawAttention, fold_output
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection.heads_as_written import from_end, named_head


class PhaseFactors(NamedTuple):
    """Real and imaginary part of M_t, a head's complex query-key matrix at rotary pair t.

    Attributes:
        re, im: matrices [d_model, d_model] of rank 2 at most, as two factors; `.dense()` is the matrix.
    """

    re: ThinProduct
    im: ThinProduct


@dataclass(frozen=True)
class HeadSpectrum:
    """The spectra of one head's M = W_Q W_K^T, from `QKOperator.spectrum()`. The unit is the unit of M.

    k = min(d_head, d_model), r = min(2 d_head, d_model).

    Attributes:
        singular_values: of M, descending.
        eigenvalues: the k eigenvalues of M that can be non-zero, largest absolute value first.
        eigenvector_condition: condition number (2-norm) of the matrix of unit eigenvectors; 1 for a normal matrix.
        symmetric_eigenvalues: eigenvalues of M_S on the space that the columns of W_Q and W_K span, ascending.
    """

    singular_values: Float64[Tensor, "k"]
    eigenvalues: Complex128[Tensor, "k"]
    eigenvector_condition: float
    symmetric_eigenvalues: Float64[Tensor, "r"]

    __repr__ = one_line


@dataclass(frozen=True)
class QKOperator:
    """The query-key operator M = W_Q W_K^T of one head, as factors: `tls.qk_operators(model)["L0H3"]`; M is `w_q @
    w_k.T`.

    Gains of the input norm and of a query/key norm are folded in; under LayerNorm both factors are centred. With n the
    normalised input, the score of query token i and key token j is n_i M n_j^T times the model's scale (usually 1 /
    sqrt(d_head)), plus terms outside M: biases, ALiBi, and the rotation between two positions. Only `dense` builds the
    d_model x d_model matrix.

    Attributes:
        layer, head: the head.
        w_q, w_k: the two factors, in float64.
        rotary: geometry of the rotary pairs; None without rotary positions.
    """

    layer: int
    head: int
    w_q: Float64[Tensor, "d_model d_head"]
    w_k: Float64[Tensor, "d_model d_head"]
    rotary: RotaryGeometry | None

    __repr__ = one_line

    def _thin_core(self) -> spectra.ThinCore:
        """Return the QR decomposition of W_Q and W_K, from which spectra are computed in d_head dimensions."""
        return spectra.thin_core(self.w_q[None], self.w_k[None])

    def core(self) -> Float64[Tensor, "k k"]:
        """Return a k x k matrix that has the non-zero eigenvalues of M, k = min(d_head, d_model)."""
        return self._thin_core().core[0]

    def dense(self) -> Float64[Tensor, "d_model d_model"]:
        """Return M as a full matrix [d_model, d_model] in float64; for small models. All other methods work on the
        factors.
        """
        return self.w_q @ self.w_k.T

    def symmetric(self) -> ThinProduct:
        """Return M_S = (M + M^T) / 2 as two factors (`.dense()` is the matrix): the part that scores two tokens alike
        in either order.
        """
        return spectra.symmetric_part(self.w_q, self.w_k)

    def antisymmetric(self) -> ThinProduct:
        """Return M_A = (M - M^T) / 2 as two factors (`.dense()` is the matrix): the part that changes its sign when
        query and key are exchanged.
        """
        return spectra.antisymmetric_part(self.w_q, self.w_k)

    def spectrum(self) -> HeadSpectrum:
        """Return a `HeadSpectrum`: singular values and eigenvalues of M, the condition number of its eigenvectors, and
        the eigenvalues of M_S.
        """
        batch = spectra.spectrum(self._thin_core())
        return HeadSpectrum(
            batch.singular_values[0],
            batch.eigenvalues[0],
            float(batch.eigenvector_condition[0]),
            batch.symmetric_eigenvalues[0],
        )

    def schur_angles(self) -> Float64[np.ndarray, "blocks"]:
        """Return the rotation angle of each diagonal block in the real Schur form of M, in radians.

        A 2 x 2 block has an angle between 0 and pi; a 1 x 1 block has 0 (positive eigenvalue) or pi (negative).
        """
        return spectra.schur_angles(self._thin_core())[0]

    def phase(self, t: int) -> PhaseFactors:
        """Return the real and imaginary part of M_t for rotary pair `t`: `.re` and `.im`, each as two factors.

        Pair 0 is the model's first pair.

        Raises:
            UnsupportedArchitecture: the layer has no rotary positions.
            IndexError: the pair does not exist.
        """
        if self.rotary is None:
            raise UnsupportedArchitecture(
                f"L{self.layer}H{self.head}: phase(t) needs rotary positions, and this layer has none: take a "
                "head of a layer with RoPE"
            )
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
    """The query-key operators of the model in `view`: `operators[layer, head]` or `operators["L0H3"]` is a
    `QKOperator`.

    Iterating yields all heads in order. A layer is read from the model at the first access to one of its heads. Only
    the last layer is kept in memory.
    """

    def __init__(self, view: AttentionView):
        self._view = view
        self._layer = lru_cache(maxsize=1)(self._read)
        self._n_heads = lru_cache(maxsize=None)(view.n_heads)
        if next(self._in_order(), None) is None:
            _ = view.layers  # raises an error that says why no layer can be read

    @cached_property
    def _pairs(self) -> list[tuple[int, int]]:
        """The (layer, head) of all heads that can be read, in order."""
        return list(self._in_order())

    def _in_order(self) -> Iterator[tuple[int, int]]:
        """Yield (layer, head) of all heads that can be read, layer by layer. A layer is read when its turn comes."""
        for layer in range(self._view.n_layers):
            with suppress(UnsupportedArchitecture):
                yield from ((layer, head) for head in range(self._n_heads(layer)))

    def _read(self, index: int) -> tuple[AttentionLayer, Tensor, Tensor]:
        """Read layer `index`: return the folded layer and the factors W_Q and W_K of its heads, [heads, d_model,
        d_head].
        """
        layer = self._view.layer(index)
        return layer, *layer.operator_factors()

    def __repr__(self) -> str:
        return f"QKOperators({self._view!r}, {len(self)} heads)"

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, key: Any) -> Any:
        """Return the `QKOperator` of a head, given by `key`: "L0H3", (layer, head) or its index among all heads; a
        slice of indices gives a list.

        Raises BadHead if the head does not exist.
        """
        if isinstance(key, slice):
            return [self[i] for i in range(len(self))[key]]
        if not isinstance(key, tuple | str):
            number = whole_number(key)
            if number is None:
                raise BadHead(f"{key!r} names no head: write operators[layer, head], or an index among all heads")
            first = None if number < 0 else next(islice(self._in_order(), number, None), None)
            key = self._pairs[number] if first is None else first
        named = named_head(key)
        known = from_end(named.layer, self._view.n_layers)
        index = None if known is None or named.head is None else from_end(named.head, self._n_heads(known))
        layer, head = one_head(self._view, key) if known is None or index is None else (known, index)  # raises
        record, w_q, w_k = self._layer(layer)
        return QKOperator(layer, head, w_q[head], w_k[head], record.rotary)

    def rotary(self, layer: int) -> RotaryGeometry | None:
        """Return the geometry of the rotary pairs of layer `layer` (columns and angle per token of each pair); None
        without rotary positions.
        """
        return self._view.rotary(layer)


def qk_operators(model: Any) -> QKOperators:
    """Return the query-key operators M = W_Q W_K^T of all heads, with the norms folded in.

    Use it to compute a number of your own from M: eigenvalues, directions, the matrix itself. Layers are read when
    needed.

    >>> import tlspectral as tls
    >>> operators = tls.qk_operators(tls.load_model("tiny-rope"))
    >>> len(operators), operators["L0H3"].w_q.shape
    (8, torch.Size([64, 16]))

    Args:
        model: a TransformerBridge or HookedTransformer.

    Returns:
        A sequence of `QKOperator` in the order of the heads, indexed by "L0H3", (layer, head) or a number. Each has the
        factors `w_q` and `w_k` [d_model, d_head] in float64, and these methods:

        * `dense()`: M [d_model, d_model].
        * `symmetric()`, `antisymmetric()`: M_S and M_A as factors; `.dense()` of the result is the matrix.
        * `spectrum()`: `.singular_values`, `.eigenvalues`, `.eigenvector_condition`, `.symmetric_eigenvalues` (of M_S).
        * `schur_angles()`: rotation angles of M's real Schur blocks, in radians.
        * `phase(t)`: real and imaginary part (`.re`, `.im`) of M_t at rotary pair t, as factors.

        The score of normalised inputs n_i, n_j is n_i M n_j^T times the model's scale (usually 1 / sqrt(d_head)), plus
        biases and rotation.

    Raises:
        UnsupportedArchitecture, BadWeights: a layer cannot be read; the message names it.

    Not established: that the factors reproduce the model's scores; check this with `verify_scores`.
    """
    return QKOperators(attention_view(model))


def ov_operators(model: Any, layer: int) -> list[ThinProduct]:
    """Return the output-value operators W_V W_O [d_model, d_model] of the heads of a layer, each as two factors in
    float64.

    >>> import tlspectral as tls
    >>> from tlspectral.heads.operators.factored import ov_operators
    >>> len(ov_operators(tls.load_model("tiny-rope"), 0))
    4

    An entry of the list has `left` = W_V and `right` = W_O^T [d_model, d_head], and `dense()` for the matrix. It acts
    on row vectors. Query heads that share values each get their own operator. W_V carries the gain of the input norm.
    Under LayerNorm both sides are centred, because the input norm and every later norm remove the mean.
    (TransformerLens's `center_writing_weights` centres the stored weights instead.) A norm behind the attention (Gemma
    2 and 3, OLMo 2) is left out.

    Raises:
        BadHead: the layer does not exist.
        UnsupportedArchitecture, BadWeights: the layer cannot be read.

    Not established: what the head writes in a run, which also depends on its attention.
    """
    return output_products(attention_view(model), layer)


def output_products(view: AttentionView, layer: int) -> list[ThinProduct]:
    """Return a list with W_V W_O of each head of layer `layer`, as two factors: `left` = W_V and `right` = W_O^T.

    `view` is a model that is already open. Norms are folded in; under LayerNorm both sides are centred. The factors are
    copies in float64.
    """
    output = centred_output(view.raw(layer), layer)
    groups = len(output.w_o) // len(output.w_v)
    return [ThinProduct(output.w_v[head // groups], w_o.T.contiguous()) for head, w_o in enumerate(output.w_o)]


def centred_output(raw: RawAttention, layer: int) -> OutputFactors:
    """Return the `OutputFactors` of all heads of a layer from its raw parameters: `.w_v` (norm folded in) and `.w_o`,
    copies in float64.

    `layer` is the layer's number, for messages. Under LayerNorm the mean over d_model is subtracted from each row of
    W_O, because later norms remove it.
    """
    output = fold_output(raw, layer)
    return replace(output, w_o=output.w_o - output.w_o.mean(2, keepdim=True)) if raw.norm.kind == "LN" else output
