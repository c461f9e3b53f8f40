"""The singular modes of a head's query-key matrix M = W_Q W_K^T, norms folded in."""

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
    """The singular value decomposition of a head's M: M = sum_k s_k u_k v_k^T, largest s_k first.

    Modes with s_k below the rounding of the stored type are left out.

    Attributes:
        query, key: u_k and v_k as columns; unit vectors of the residual stream after the norm.
        values: s_k.
        read_query: [d_head, modes]; a query (without bias) times this matrix is x . u_k.
        written_query: [modes, d_head], u_k^T W_Q: the query that direction u_k alone makes.
        square: sum of the squares of all singular values.
        triangle: R of the QR decomposition W_Q = Q R.
    """

    query: Float64[Tensor, "d_model modes"]
    values: Float64[Tensor, "modes"]
    key: Float64[Tensor, "d_model modes"]
    read_query: Float64[Tensor, "d_head modes"]
    written_query: Float64[Tensor, "modes d_head"]
    square: float
    triangle: Float64[Tensor, "d_head d_head"]


def query_key_modes(layer: AttentionLayer, heads: list[int]) -> list[Modes]:
    """Return the singular modes of the query-key matrix M of each of these heads, as a list of `Modes`.

    A query without bias, x W_Q, times `read_query` is x . u_k, because u_k = M v_k / s_k. With a query/key norm, W_Q
    and W_K include its gain, and W_Q of a layer with learnable rotary positions includes gain and phase. "Query" then
    means the query after these, without the norm's factor per token.
    """
    modes, factors = [], layer.operator_factors()
    tolerance = rank_tolerance(layer.storage_dtype, layer.d_model, layer.d_head)
    with one_thread():
        for w_q, w_k in ((factors[0][head], factors[1][head]) for head in heads):
            left, values, right = thin_svd(ThinProduct(w_q, w_k))
            kept = values > tolerance * values[0]
            left, right, large = left[:, kept], right[:, kept], values[kept]
            read, square = (w_k.T @ right) / large, float(values.square().sum())
            triangle = torch.linalg.qr(w_q, mode="r").R
            modes.append(Modes(left, large, right, read, left.T @ w_q, square, triangle))
    return modes
