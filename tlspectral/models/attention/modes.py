"""The singular modes of a head's query-key operator M = W_Q W_K^T, norms folded in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
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
        triangle: R of W_Q = Q R.
    """

    query: Float64[Tensor, "d_model modes"]
    values: Float64[Tensor, "modes"]
    key: Float64[Tensor, "d_model modes"]
    read_query: Float64[Tensor, "d_head modes"]
    written_query: Float64[Tensor, "modes d_head"]
    square: float
    triangle: Float64[Tensor, "d_head d_head"]


def query_key_modes(layer: AttentionLayer, heads: list[int]) -> list[Modes]:
    """Return the modes of some heads. A query without bias, x W_Q, times `read_query` is x . u_k, as u_k = M v_k / s_k.

    With a query/key norm W_Q and W_K carry its gains, and W_Q of a spectral layer gain and phase: the query is then the
    one behind these, without the factor of its token.
    """
    found, factors = [], layer.operator_factors()
    tolerance = rank_tolerance(layer.storage_dtype, layer.d_model, layer.d_head)
    with one_thread():
        for w_q, w_k in ((factors[0][head], factors[1][head]) for head in heads):
            left, values, right = thin_svd(ThinProduct(w_q, w_k))
            kept = values > tolerance * values[0]
            left, right, large = left[:, kept], right[:, kept], values[kept]
            read, square = (w_k.T @ right) / large, float(values.square().sum())
            triangle = torch.linalg.qr(w_q, mode="r").R
            found.append(Modes(left, large, right, read, left.T @ w_q, square, triangle))
    return found
