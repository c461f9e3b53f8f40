"""The operators of all heads of a model as thin factors, whatever file or model they are read from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Complex128, Float64, Int64
from torch import Tensor

from tlspectral.algebra.rotary import RotaryGeometry, pairs_and_rest
from tlspectral.algebra.turned_stream import Moments, moments_of
from tlspectral.heads.composition import raw_layer
from tlspectral.heads.operators.factored import centred_output
from tlspectral.models.reading.layer import AttentionLayer, fold_attention
from tlspectral.models.reading.view import AttentionView

if TYPE_CHECKING:
    from tlspectral.models.checkpoints.layers import WeightFiles

    Source = AttentionView | WeightFiles

ROUNDING = 1e-6
"""Relative difference of numbers that count as equal: other programs compute frequencies in float32."""

Factors = tuple[Float64[Tensor, "heads d_model columns"], Float64[Tensor, "heads columns d_model"]]
"""Factors (left, right) of a matrix for each head."""


@dataclass(frozen=True)
class Block:
    """The operators of heads of one layer that rotate alike, as thin factors with the norms folded in.

    Attributes:
        layer: number of the layer. heads: numbers of the heads within it.
        bilinear: how scores depend on M.
        keys: for each head, the row of `k`, `rest_k` and `w_v` that it reads.
        frequencies: of the rotary pairs, descending; none is 0.
        q, k: complex rotary pairs of W_Q and W_K, in the order of `frequencies`.
        rest_q, rest_k: columns of W_Q and W_K that do not rotate.
        w_v, w_o: W_V and W_O.
    """

    layer: int
    heads: list[int]
    bilinear: str
    keys: Int64[Tensor, "heads"]
    frequencies: Float64[Tensor, "pairs"]
    q: Complex128[Tensor, "heads pairs d_model"]
    k: Complex128[Tensor, "keys pairs d_model"]
    rest_q: Float64[Tensor, "heads d_model rest"]
    rest_k: Float64[Tensor, "keys d_model rest"]
    w_v: Float64[Tensor, "keys d_model d_head"]
    w_o: Float64[Tensor, "heads d_head d_model"]

    @property
    def rest(self) -> Factors:
        """W_Q and W_K^T of the columns that do not rotate, for each head."""
        return self.rest_q, self.rest_k[self.keys].mT

    @property
    def output(self) -> Factors:
        """W_V and W_O of each head."""
        return self.w_v[self.keys], self.w_o

    @cached_property
    def qk_moments(self) -> Moments:
        """What the null needs of the query-key operators."""
        return moments_of((self.q, self.k[self.keys]), *self.rest)

    @cached_property
    def ov_moments(self) -> Moments:
        """What the null needs of W_V W_O."""
        return moments_of(None, *self.output)

    @cached_property
    def norms(self) -> tuple[Float64[Tensor, "heads"], Float64[Tensor, "heads"]]:
        """Two tensors [heads]: sqrt(||M_rest||^2 + sum_t ||M_t||^2), and ||W_V W_O||."""
        keys = self.keys
        pairs = (_squared(self.q) * _squared(self.k)[keys]).sum(1)
        rest = ((self.rest_q.mT @ self.rest_q) * (self.rest_k.mT @ self.rest_k)[keys]).sum((1, 2))
        output = ((self.w_v.mT @ self.w_v)[keys] * (self.w_o @ self.w_o.mT)).sum((1, 2))
        return (pairs + rest).sqrt(), output.sqrt()

    def columns(self, head: int) -> tuple[Float64[Tensor, "d_model columns"], Float64[Tensor, "d_model columns"]]:
        """Return W_Q and W_K of a head (its row in this block): real parts of the pairs, imaginary parts, the rest."""
        key = self.keys[head]
        sides = (self.q[head], self.rest_q[head]), (self.k[key], self.rest_k[key])
        of_q, of_k = (torch.cat([pairs.real.T, pairs.imag.T, rest], dim=1) for pairs, rest in sides)
        return of_q, of_k

    def variances_of_shared(self, n: int) -> Iterator[np.ndarray]:
        """Yield the variance of the product of two heads that read the same keys and values, [heads, heads]: of
        query-key operators when only the queries are turned, and of W_V W_O when only what is written is turned.

        Entries of heads that do not share keys have no meaning.
        """
        columns = [self.columns(head) for head in range(len(self.heads))]
        queries, keys = (torch.stack(side) for side in zip(*columns, strict=True))
        pairs = 2 * len(self.frequencies)
        weights = keys.mT @ keys
        weights[:, :pairs] = weights[:, :, :pairs] = 0
        sizes = _squared(self.k)[self.keys]
        weights.diagonal(dim1=1, dim2=2)[:, :pairs] = torch.cat([sizes, sizes], dim=1)
        for weight, gram in (
            (weights, queries.mT @ queries),
            ((self.w_v.mT @ self.w_v)[self.keys], self.w_o @ self.w_o.mT),
        ):
            yield ((weight.mT @ gram @ weight).flatten(1) @ gram.flatten(1).T / n).numpy()


def _squared(pairs: Complex128[Tensor, "heads pairs d_model"]) -> Float64[Tensor, "heads pairs"]:
    """Return the squared norm of the complex vector of each pair."""
    return (pairs.real.square() + pairs.imag.square()).sum(2)


@dataclass(frozen=True)
class Operators:
    """The operators of all heads of a model.

    Attributes:
        blocks: the heads, in the order of the model.
        dimension: dimension n of the space in which a stream is turned.
        d_model: width of the stream.
        name: the model's name, for messages.
    """

    blocks: list[Block]
    dimension: int
    d_model: int
    name: str

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of all heads, in order."""
        return [(block.layer, head) for block in self.blocks for head in block.heads]

    def place(self, number: int) -> tuple[Block, int]:
        """Return the block that holds a head, and the head's row there; `number` counts all heads."""
        places = [(block, row) for block in self.blocks for row in range(len(block.heads))]
        return places[number]

    def kinds(self) -> list[tuple[list[Block], np.ndarray]]:
        """Group blocks by equal frequencies: return (blocks, numbers of their heads among all heads) for each group."""
        kinds: list[tuple[list[Block], list[int]]] = []
        first = 0
        for block in self.blocks:
            kind = next((kind for kind in kinds if equal_frequencies(kind[0][0], block)), None)
            if kind is None:
                kinds.append(kind := ([], []))
            kind[0].append(block)
            kind[1].extend(range(first, first := first + len(block.heads)))
        return [(blocks, np.array(numbers)) for blocks, numbers in kinds]


def equal_frequencies(one: Block, other: Block) -> bool:
    """Return True if the heads of both blocks have the same rotary frequencies, to rounding."""
    a, b = one.frequencies, other.frequencies
    return a.shape == b.shape and torch.allclose(a, b, rtol=ROUNDING, atol=0)


def read_operators(source: Source) -> Operators:
    """Read the operators of all heads of `source`, a loaded model or weight files."""
    if not isinstance(source, AttentionView):
        source.prepare(source.layers, "query-key")
        source.prepare(source.layers, "output")
    blocks, dimensions = [], set()
    for index in source.layers:
        with raw_layer(source, index, "query-key") as raw:
            layer = fold_attention(raw, index)
        with raw_layer(source, index, "output") as raw:
            output = centred_output(raw, index)
        dimensions.add(layer.effective_dimension)
        blocks += _blocks(layer, output.w_v, output.w_o)
    return Operators(blocks, max(dimensions), source.d_model, str(source.source["model"]))


def _blocks(layer: AttentionLayer, w_v: Tensor, w_o: Tensor) -> Iterator[Block]:
    """Yield a `Block` of a folded layer; one for each head if its heads have frequencies of their own.

    `w_v` and `w_o` are W_V and W_O of the layer.
    """
    w_q, w_k = layer.operator_factors()
    shared = layer.n_heads // layer.n_kv_heads
    keys = torch.arange(layer.n_heads) // shared
    w_k, values = w_k[::shared], layer.n_heads // len(w_v)
    if len(w_v) != len(w_k):  # one latent of values, keys by head
        w_v = w_v.repeat_interleave(values, dim=0)[::shared]
    every = [[head] for head in range(layer.n_heads)] if layer.rotary is not None and layer.rotary.per_head else None
    for heads in every or [list(range(layer.n_heads))]:
        rows = keys[heads].unique()
        q, k, rest_q, rest_k, frequencies = _sorted_pairs(
            w_q[heads], w_k[rows], layer.rotary and layer.rotary.of_heads(heads)
        )
        own = torch.searchsorted(rows, keys[heads])
        yield Block(layer.layer, heads, layer.bilinear, own, frequencies, q, k, rest_q, rest_k, w_v[rows], w_o[heads])


def _sorted_pairs(w_q: Tensor, w_k: Tensor, rotary: RotaryGeometry | None) -> tuple[Tensor, ...]:
    """Divide W_Q and W_K into rotary pairs, by falling frequency, and columns that do not rotate.

    `w_q` and `w_k` have a row per head, `rotary` is the geometry of the pairs. The result is (pairs of W_Q, pairs of
    W_K, rest of W_Q, rest of W_K, frequencies). Pairs of a negative frequency are conjugated; pairs of frequency 0
    belong to the rest.
    """
    (q, rest_q), (k, rest_k) = (pairs_and_rest(factor, rotary) for factor in (w_q, w_k))
    theta = torch.zeros(0, dtype=torch.float64) if rotary is None else rotary.theta.detach().cpu().double().flatten()
    order = theta.abs().argsort(descending=True, stable=True)
    turning, still = order[theta[order] != 0], order[theta[order] == 0]
    if len(still):
        (rest_q, rest_k) = (
            torch.cat([rest, pairs[:, still].real.mT, pairs[:, still].imag.mT], dim=2)
            for pairs, rest in ((q, rest_q), (k, rest_k))
        )
    q, k = q[:, turning], k[:, turning]
    if bool((backwards := theta[turning] < 0).any()):
        q[:, backwards], k[:, backwards] = q[:, backwards].conj(), k[:, backwards].conj()
    return q, k, rest_q, rest_k, theta[turning].abs()
