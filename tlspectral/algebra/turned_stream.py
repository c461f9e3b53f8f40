"""The null of likeness: inner products of two heads' operators when one residual stream is turned at random (Haar).

Second moments of orthogonal matrices (Weingarten calculus) make mean and variance exact; `turned_products` has the
products of single turns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor


class Moments(NamedTuple):
    """Numbers of each head from which `null_of_products` computes mean and variance of the null.

    A head has the real matrices A_c: Re M_t and Im M_t of each rotary pair t, and M_rest, which does not rotate.

    traces: tr A_c of each matrix.
    products: three vectors for each head: tr A_c tr A_e, <A_c, A_e> (Frobenius) and tr(A_c A_e), over all pairs (c, e).
        They are stored as fewer, scaled combinations: inner products of two heads' vectors stay the same.
    """

    traces: Float64[Tensor, "heads matrices"]
    products: Float64[Tensor, "heads 3 pairs"]


def moments_of(pairs: tuple[Tensor, Tensor] | None, left: Tensor, right: Tensor) -> Moments:
    """Return the `Moments` of heads from the rotary pairs (q, k), or None, and from M_rest = left @ right.

    From sums over M_t = q_t k_t^H: with X = tr(conj(M_t) M_s) and Y = tr(M_t M_s), the four products of real and
    imaginary parts have the inner product Re(X X'^* + Y Y'^*) / 2. The other kinds of products are alike.
    """
    core = right @ left
    rest_trace = core.diagonal(dim1=1, dim2=2).sum(1)
    both = ((left.mT @ left) * (right @ right.mT)).sum((1, 2))
    rest = torch.stack([rest_trace.square(), both, (core * core.mT).sum((1, 2))], dim=1)
    if pairs is None or not pairs[0].shape[1]:
        return Moments(rest_trace[:, None], rest[:, :, None])
    q, k = pairs
    sides = (("qq", q, q), ("kk", k, k), ("kq", k, q))
    hermitian = {name: one.conj() @ other.mT for name, one, other in sides}
    bilinear = {name: one @ other.mT for name, one, other in sides}
    trace = hermitian["kq"].diagonal(dim1=1, dim2=2)
    x = torch.stack(
        [
            trace.conj()[:, :, None] * trace[:, None],
            hermitian["qq"] * hermitian["kk"].mT,
            bilinear["kq"] * bilinear["kq"].mT.conj(),
        ],
        dim=1,
    )
    y = torch.stack(
        [
            trace[:, :, None] * trace[:, None],
            bilinear["qq"] * bilinear["kk"].conj(),
            hermitian["kq"] * hermitian["kq"].mT,
        ],
        dim=1,
    )
    # What pairs and M_rest have in common; each pair of M_rest and M_t occurs twice.
    (q_left, q_right), (k_left, k_right) = (
        [side @ columns.to(side.dtype) for columns in (left, right.mT)] for side in (q, k.conj())
    )
    mixed = torch.stack([rest_trace[:, None] * trace, (q_left * k_right).sum(2), (q_right * k_left).sum(2)], dim=1)
    flat = [
        torch.view_as_real(part.flatten(2) * scale).flatten(2)
        for part, scale in ((x, 0.5**0.5), (y, 0.5**0.5), (mixed, 2**0.5))
    ]
    traces = torch.cat([trace.real, trace.imag, rest_trace[:, None]], dim=1)
    return Moments(traces, torch.cat([*flat, rest[:, :, None]], dim=2))


def null_of_products(a: Sequence[Moments], b: Sequence[Moments], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of sum_c <A_c, O B_c O^T> for all pairs of heads, O a random orthogonal n x n matrix.

    `a` and `b` are the moments of the heads of two models, some heads at a time. Exact (Weingarten calculus): the mean
    is sum_c tr A_c tr B_c / n. The second moment sums over the three ways to pair the four factors O.
    """
    of_a, of_b = (Moments(*map(torch.cat, zip(*side, strict=True))) for side in (a, b))
    mean = of_a.traces @ of_b.traces.T / n
    same_pairing = torch.einsum("apf,bpf->ab", of_a.products, of_b.products)
    any_pairing = of_a.products.sum(1) @ of_b.products.sum(1).T
    second = ((n + 2) * same_pairing - any_pairing) / (n * (n - 1) * (n + 2))
    return mean.numpy(), (second - mean.square()).numpy()


def turned_products(of_queries: Tensor, of_keys: Tensor, pairs: int) -> Float64[Tensor, "draws"]:
    """Return <M_rest, M'_rest> + Re sum_t <M_t, M'_t> from inner products of the real columns of two heads.

    `of_queries` and `of_keys` [draws, columns, columns] are products of the columns of W_Q and of W_K: `pairs` real
    parts, `pairs` imaginary parts, then the rest.
    """
    t = torch.arange(pairs)
    inner = [
        torch.complex(
            products[:, t, t] + products[:, pairs + t, pairs + t], products[:, t, pairs + t] - products[:, pairs + t, t]
        )
        for products in (of_queries, of_keys)
    ]
    rest = of_queries[:, 2 * pairs :, 2 * pairs :] * of_keys[:, 2 * pairs :, 2 * pairs :]
    return (inner[0] * inner[1].conj()).real.sum(1) + rest.sum((1, 2))
