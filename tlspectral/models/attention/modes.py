"""The singular modes of a head's query-key operator M = W_Q W_K^T, norms folded in."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.algebra.spectra import ThinProduct, rank_tolerance, thin_svd
from tlspectral.models.reading.layer import AttentionLayer


@dataclass(frozen=True)
class Modes:
    """M = sum_k s_k u_k v_k^T, largest s_k first, those that are above the rounding of storage.

    Attributes:
        query, key: u_k and v_k as columns, unit vectors of the residual stream behind the norm.
        values: s_k.
        read_query: x . u_k of a query without bias, [d_head, modes]: what stands behind W_Q times this.
        written_query: u_k^T W_Q, the query that mode k alone makes, [modes, d_head].
        square: sum of all squared singular values.
    """

    query: Float64[Tensor, "d_model modes"]
    values: Float64[Tensor, "modes"]
    key: Float64[Tensor, "d_model modes"]
    read_query: Float64[Tensor, "d_head modes"]
    written_query: Float64[Tensor, "modes d_head"]
    square: float


def query_key_modes(layer: AttentionLayer, head: int) -> Modes:
    """Return the modes of one head. A query without bias, x W_Q, times `read_query` is x . u_k, since u_k = M v_k/s_k.

    With a query/key norm W_Q and W_K carry its gains, and W_Q of a spectral layer gain and phase: the query is then the
    one behind these, without the factor of its token.
    """
    w_q, w_k = (factors[head] for factors in layer.operator_factors())
    with one_thread():
        left, values, right = thin_svd(ThinProduct(w_q, w_k))
    tolerance = rank_tolerance(layer.storage_dtype, layer.d_model, layer.d_head)
    kept = values > tolerance * values[0]
    left, right, large = left[:, kept], right[:, kept], values[kept]
    read, square = (w_k.T @ right) / large, float(values.square().sum())
    return Modes(left, large, right, read, left.T @ w_q, square)
