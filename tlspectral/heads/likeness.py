"""Whether two heads are the same head: the likeness of their operators, whatever basis the weights are written in.

The likeness of two query-key operators is <M_rest, M'_rest> + Re sum_t <M_t, M'_t> over both norms. M_t is the complex
operator of a rotary pair, and pairs are matched by frequency; M_rest are the columns that do not rotate. The null turns
the residual stream of the second head at random (Haar). Its standard deviation is exact: second moments of orthogonal
matrices (Weingarten calculus), no draws.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Complex128, Float64, Int64
from torch import Tensor

from tlspectral.algebra.nulls import block_generator, haar_blocks, one_thread
from tlspectral.algebra.rotary import RotaryGeometry, pairs_and_rest
from tlspectral.errors.settings import checked_settings
from tlspectral.heads.composition import raw_layer
from tlspectral.heads.operators.factored import centred_output
from tlspectral.models.opening import open_layers
from tlspectral.models.reading.layer import AttentionLayer, fold_attention
from tlspectral.models.reading.view import AttentionView
from tlspectral.selection import counted, head_name
from tlspectral.tables.schema import Schema, columns

if TYPE_CHECKING:
    from tlspectral.models.checkpoints.layers import WeightFiles

    Source = AttentionView | WeightFiles

TWINS = 0.5
"""Two heads are twins if the likeness of their query-key operators is above this level."""

BEYOND_NULL = 10.0
"""A likeness this many standard deviations above the mean of its null shows that both heads read one basis."""

_LEAST_SHARE = 0.05  # of the heads, that need a counterpart beyond the null: single heads can be as far by chance

ALL_PAIRS = 300
"""With more heads than this, a table has the nearest heads of each head instead of all pairs."""

_NEAREST = 10  # rows per head of such a table
_CHECKED_PAIRS = 64  # pairs that are turned at random to check the exact standard deviations
_SLAB_BYTES = 2**27
_STRIPE = 32  # heads of a stripe of the upper triangle of all pairs
_ROUNDING = 1e-6  # relative difference of frequencies that count as equal: other programs compute them in float32

HEAD_LIKENESS = Schema(
    "head_likeness",
    columns("""
        a           | label | The first head, such as L18H6.
        b           | label | The second head, of the same model or of model b.
        qk          | ratio | Likeness of the query-key operators: <M_rest, M'_rest> + Re sum_t <M_t, M'_t> over both
                    |       | norms, from -1 to 1. M_t: operator of rotary pair t, pairs matched by frequency. NaN for
                    |       | heads of different frequencies, and for M = 0.
        ov          | ratio | Cosine of the matrices W_V W_O of both heads, from -1 to 1.
        qk_null_sd  | ratio | Standard deviation of qk if the residual stream of head b is turned at random. For heads
                    |       | that read the same keys only the queries are turned.
        ov_null_sd  | ratio | The same for ov. For heads that read the same values only what they write is turned.
        rank        | count | Rank of qk among all pairs, 1 for the most alike; missing where qk is NaN.
        shared_keys | flag  | Whether both heads read the keys and values of one key/value head.
        bilinear    | label | How the scores depend on M, as in the head table; two words if the heads differ in it.
    """),
    "`tls.head_likeness`",
)


@checked_settings
def head_likeness(a: Any, b: Any = None, *, draws: int = 19, nearest: int | None = None, seed: int = 0) -> pd.DataFrame:
    """Measure how alike the operators of two heads are, for all pairs of a model or of two models.

    Use it to find twins in a model, and a head again after a model was shuffled, merged, pruned or trained further.

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> tls.head_likeness(model)[["a", "b", "qk"]].round(2).values.tolist()[0]  # the most alike
    ['L0H2', 'L0H3', 0.19]
    >>> again = tls.head_likeness(model, tls.load_model("tiny-rope"), nearest=1)  # a second model
    >>> (again["a"] == again["b"]).all().item()
    True

    Args:
        a: a TransformerBridge, a HookedTransformer, a model of transformers, or a name or path. Folders of safetensors
            and hub models are read layer by layer, without loading.
        b: a second model of equal d_model, whose heads are compared with those of `a`. Default: pairs within `a`.
        draws: random turns of the stream with which the standard deviations are checked; 0: no check.
        nearest: rows per head of `a`, its most alike heads. Default: all pairs up to 300 heads in a model, else 10.
        seed: of these turns.

    Returns:
        DataFrame with a row per pair, the most alike first; with `nearest`, by head. Columns: `a, b, qk, ov,
        qk_null_sd, ov_null_sd, rank, shared_keys, bilinear`. `qk` and `ov` are 1 for the same operator, whatever basis
        W_Q, W_K, W_V and W_O are written in. `_null_sd` is the exact standard deviation when the residual stream of the
        second head is turned at random. `attrs["null"]`: over `draws` turns of up to 64 pairs, the root mean square of
        (qk - mean) / `qk_null_sd` (1 up to sampling), and the largest.

    Raises:
        ValueError: the models differ in d_model.
        BadWeights, UnsupportedArchitecture: a layer cannot be read.

    *Twins* are pairs with `qk` above .5. A head is *found again* in model b if its counterpart is the nearest of all
    heads there, by more than the second.

    Not established: that twins do the same, or stand in for each other. A likeness far from its null says that both
    heads read one residual stream, so it has no p. More: docs/two_models.md.
    """
    turns = counted(draws, 0, "draws is how many random turns check the null")
    if nearest is not None:
        nearest = counted(nearest, 1, "nearest is how many rows each head has")
    with open_layers(a) as of_a:
        if b is None:
            pairs = likeness_of(of_a)
            attrs = of_a.origin(of_a.layers)
        else:
            with open_layers(b) as of_b:
                pairs = likeness_of(of_a, of_b)
                origins = {side: source.origin(source.layers) for side, source in (("a", of_a), ("b", of_b))}
            attrs = {f"{name}_{side}": value for side, origin in origins.items() for name, value in origin.items()}
    if nearest is None and max(pairs.qk.shape) > ALL_PAIRS:
        nearest = _NEAREST
    return HEAD_LIKENESS.frame(_rows(pairs, nearest), attrs | {"null": pairs.checked(turns, seed), "seed": seed})


def _rows(pairs: Likeness, nearest: int | None) -> dict[str, Any]:
    """Return the columns of the table of `head_likeness`, a dict from name to values.

    `pairs` has the numbers of all pairs. `nearest` is the number of rows per head of model a, None for all pairs.
    """
    n_a, n_b = pairs.qk.shape
    first, second = np.indices((n_a, n_b)).reshape(2, -1) if pairs.a is not pairs.b else np.triu_indices(n_a, 1)
    ranks = np.full((n_a, n_b), np.nan)
    known = ~np.isnan(pairs.qk[first, second])
    ranks[first[known], second[known]] = pd.Series(-pairs.qk[first, second][known]).rank(method="min")
    if pairs.a is pairs.b:
        ranks = np.fmax(ranks, ranks.T)
    # Pairs without qk follow, by ov.
    order = np.lexsort((-pairs.ov[first, second], ranks[first, second]))
    if nearest is not None:
        place = np.where(np.isnan(ranks), np.inf, ranks)
        candidates = [np.lexsort((-pairs.ov[head], place[head])) for head in range(n_a)]
        if pairs.a is pairs.b:
            candidates = [heads[heads != head] for head, heads in enumerate(candidates)]
        kept = np.array([heads[:nearest] for heads in candidates])
        first, second = np.repeat(np.arange(n_a), kept.shape[1]), kept.ravel()
        order = np.arange(len(first))
    first, second = first[order], second[order]
    sides = (pairs.a, first), (pairs.b, second)
    names = [np.array([head_name(*head) for head in side.heads], dtype=object)[of_side] for side, of_side in sides]
    words = [
        np.array([block.bilinear for block in side.blocks for _ in block.heads])[of_side].tolist()
        for side, of_side in sides
    ]
    return {
        "a": names[0],
        "b": names[1],
        **{name: getattr(pairs, name)[first, second] for name in ("qk", "ov", "qk_null_sd", "ov_null_sd")},
        "rank": pd.array(ranks[first, second], dtype="Int64"),
        "shared_keys": pairs.shared_keys[first, second],
        "bilinear": [of_a if of_a == of_b else f"{of_a}, {of_b}" for of_a, of_b in zip(*words, strict=True)],
    }


_Factors = tuple[Float64[Tensor, "heads d_model columns"], Float64[Tensor, "heads columns d_model"]]
"""Factors (left, right) of a matrix for each head."""


@dataclass(frozen=True)
class _Block:
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
    def rest(self) -> _Factors:
        """W_Q and W_K^T of the columns that do not rotate, for each head."""
        return self.rest_q, self.rest_k[self.keys].mT

    @property
    def output(self) -> _Factors:
        """W_V and W_O of each head."""
        return self.w_v[self.keys], self.w_o

    @cached_property
    def qk_moments(self) -> _Moments:
        """What the null needs of the query-key operators."""
        return _moments((self.q, self.k[self.keys]), *self.rest)

    @cached_property
    def ov_moments(self) -> _Moments:
        """What the null needs of W_V W_O."""
        return _moments(None, *self.output)

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


def _squared(pairs: Complex128[Tensor, "heads pairs d_model"]) -> Float64[Tensor, "heads pairs"]:
    """Return the squared norm of the complex vector of each pair."""
    return (pairs.real.square() + pairs.imag.square()).sum(2)


@dataclass(frozen=True)
class _Operators:
    """The operators of all heads of a model.

    Attributes:
        blocks: the heads, in the order of the model.
        dimension: dimension n of the space in which a stream is turned.
        d_model: width of the stream.
        name: the model's name, for messages.
    """

    blocks: list[_Block]
    dimension: int
    d_model: int
    name: str

    @property
    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of all heads, in order."""
        return [(block.layer, head) for block in self.blocks for head in block.heads]

    def place(self, number: int) -> tuple[_Block, int]:
        """Return the block that holds a head, and the head's row there; `number` counts all heads."""
        places = [(block, row) for block in self.blocks for row in range(len(block.heads))]
        return places[number]

    def kinds(self) -> list[tuple[list[_Block], np.ndarray]]:
        """Group blocks by equal frequencies: return (blocks, numbers of their heads among all heads) for each group."""
        kinds: list[tuple[list[_Block], list[int]]] = []
        first = 0
        for block in self.blocks:
            kind = next((kind for kind in kinds if _equal_frequencies(kind[0][0], block)), None)
            if kind is None:
                kinds.append(kind := ([], []))
            kind[0].append(block)
            kind[1].extend(range(first, first := first + len(block.heads)))
        return [(blocks, np.array(numbers)) for blocks, numbers in kinds]


def _equal_frequencies(one: _Block, other: _Block) -> bool:
    """Return True if the heads of both blocks have the same rotary frequencies, to rounding."""
    a, b = one.frequencies, other.frequencies
    return a.shape == b.shape and torch.allclose(a, b, rtol=_ROUNDING, atol=0)


def _read(source: Source) -> _Operators:
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
    return _Operators(blocks, max(dimensions), source.d_model, str(source.source["model"]))


def _blocks(layer: AttentionLayer, w_v: Tensor, w_o: Tensor) -> Iterator[_Block]:
    """Yield a `_Block` of a folded layer; one for each head if its heads have frequencies of their own.

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
        yield _Block(layer.layer, heads, layer.bilinear, own, frequencies, q, k, rest_q, rest_k, w_v[rows], w_o[heads])


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


@dataclass(frozen=True)
class Likeness:
    """The likeness of every head of model a with every head of model b, with its null.

    All arrays are [heads of a, heads of b].

    Attributes:
        a, b: the operators of both models; the same object for pairs within one model.
        qk, ov: likeness of the query-key operators and of W_V W_O.
        qk_mean, ov_mean, qk_null_sd, ov_null_sd: mean and standard deviation under the null.
        shared_keys: True where both heads read one key/value head.
    """

    a: _Operators
    b: _Operators
    qk: Float64[np.ndarray, "heads_a heads_b"]
    ov: Float64[np.ndarray, "heads_a heads_b"]
    qk_mean: Float64[np.ndarray, "heads_a heads_b"]
    ov_mean: Float64[np.ndarray, "heads_a heads_b"]
    qk_null_sd: Float64[np.ndarray, "heads_a heads_b"]
    ov_null_sd: Float64[np.ndarray, "heads_a heads_b"]
    shared_keys: Bool[np.ndarray, "heads_a heads_b"]

    @property
    def common_basis(self) -> bool:
        """True if the heads of both models read one residual stream in one basis.

        This asks that 5 % of the heads of a have a head in b whose qk or ov is ten standard deviations above its null.
        Two trainings from different seeds have none.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            beyond = (self.qk - self.qk_mean > BEYOND_NULL * self.qk_null_sd) | (
                self.ov - self.ov_mean > BEYOND_NULL * self.ov_null_sd
            )
        return bool(beyond.any(1).mean() >= _LEAST_SHARE)

    def counterparts(self) -> tuple[pd.DataFrame, dict[str, str]]:
        """Return the nearest head of model b for each head of model a, and the heads that moved to another index.

        Nearness is the mean of qk and ov (ov alone where qk is NaN). The table has `layer, head, counterpart,
        counterpart_likeness`. A head moved if its counterpart has another index, a likeness above .5, and this head as
        its own nearest; the dict has its name in b by its name in a.
        """
        nearness = np.nan_to_num(np.where(np.isnan(self.qk), self.ov, (self.qk + self.ov) / 2), nan=-1.0)
        heads_a, heads_b = self.a.heads, self.b.heads
        place = {head: number for number, head in enumerate(heads_b)}
        best, moved = nearness.argmax(1), {}
        for number, head in enumerate(heads_a):
            own, nearest = place.get(head), best[number]
            if own is not None and nearness[number, own] > nearness[number, nearest] - _ROUNDING:
                best[number] = own  # of equal heads its own
            elif nearness[number, nearest] > TWINS and nearness[:, nearest].argmax() == number:
                moved[head_name(*head)] = head_name(*heads_b[nearest])
        layers, indices = zip(*heads_a, strict=True)
        table = {
            "layer": layers,
            "head": indices,
            "counterpart": [head_name(*heads_b[number]) for number in best],
            "counterpart_likeness": nearness[np.arange(len(best)), best],
        }
        return pd.DataFrame(table), moved

    def checked(self, draws: int, seed: int) -> dict[str, float | int] | None:
        """Turn the stream of the second head of up to 64 random pairs `draws` times, and return how far `qk` then is
        from its mean, in exact standard deviations.

        The result has `pairs`, `draws`, `rms` (root mean square, 1 up to sampling) and `largest` (absolute value).
        None for no draws, and without pairs that can be turned. Pairs that share keys are left out.
        """
        usable = np.argwhere(np.isfinite(self.qk_null_sd) & (self.qk_null_sd > 0) & ~self.shared_keys)
        if not draws or not len(usable):
            return None
        chosen = np.random.default_rng(seed).permutation(len(usable))[:_CHECKED_PAIRS]
        blocks: dict[int, Float64[Tensor, "draws k k"]] = {}
        deviations = []
        n = self.a.dimension
        for i, j in usable[chosen].tolist():
            (block_a, row_a), (block_b, row_b) = self.a.place(i), self.b.place(j)
            # Only the blocks of a turn between the spans of [W_Q, W_K] count.
            (q, k), (other_q, other_k) = (
                torch.linalg.qr(torch.cat(block.columns(row), dim=1), mode="r").R[:n].chunk(2, dim=1)
                for block, row in ((block_a, row_a), (block_b, row_b))
            )
            size = max(len(q), len(other_q))
            if size not in blocks:
                blocks[size] = haar_blocks(n, size, draws, block_generator(seed, n, size))
            turn = blocks[size][:, : len(q), : len(other_q)]
            pairs = len(block_a.frequencies)
            products = _turned_products(q.T @ turn @ other_q, k.T @ turn @ other_k, pairs)
            norms = block_a.norms[0][row_a] * block_b.norms[0][row_b]
            deviations.append((products / norms - self.qk_mean[i, j]) / self.qk_null_sd[i, j])
        drawn = torch.cat(deviations)
        return {
            "pairs": len(chosen),
            "draws": draws,
            "rms": float(drawn.square().mean().sqrt()),
            "largest": float(drawn.abs().max()),
        }


def _turned_products(of_queries: Tensor, of_keys: Tensor, pairs: int) -> Float64[Tensor, "draws"]:
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


def likeness_of(source_a: Source, source_b: Source | None = None) -> Likeness:
    """Return the `Likeness` of all heads of two open models, or of one model with itself.

    Raises ValueError for models of different d_model.
    """
    with one_thread():
        a = _read(source_a)
        b = a if source_b is None else _read(source_b)
        if a.d_model != b.d_model:
            raise ValueError(
                f"{a.name} (a) has d_model {a.d_model} and {b.name} (b) {b.d_model}: heads can be compared only if "
                "they read a stream of the same width; give a model and a changed copy of it"
            )
        n = a.dimension if a.dimension == b.dimension else a.d_model
        norms = [
            [torch.cat(of_blocks).numpy() for of_blocks in zip(*(block.norms for block in side.blocks), strict=True)]
            for side in (a, b)
        ]
        qk, qk_mean, qk_variance = _query_key_products(a, b, n)
        outputs = [[block.output for block in side.blocks] for side in (a, b)]
        ov = _products(outputs[0], None if a is b else outputs[1])
        ov_mean, ov_variance = _null([[block.ov_moments for block in side.blocks] for side in (a, b)], n)
        shared = np.zeros(qk.shape, dtype=bool)
        first = 0
        for block in a.blocks if a is b else []:
            rows = slice(first, first := first + len(block.heads))
            same = shared[rows, rows] = (block.keys[:, None] == block.keys).fill_diagonal_(False).numpy()
            for mean, variance, own in zip(
                (qk_mean, ov_mean), (qk_variance, ov_variance), _variances_of_shared(block, n), strict=True
            ):
                mean[rows, rows][same] = 0
                variance[rows, rows][same] = own[same]
    numbers = {}
    for name, place, (product, mean, variance) in (
        ("qk", 0, (qk, qk_mean, qk_variance)),
        ("ov", 1, (ov, ov_mean, ov_variance)),
    ):
        scale = np.outer(norms[0][place], norms[1][place])
        scale[scale == 0] = np.nan
        numbers |= {name: product / scale, f"{name}_mean": mean / scale}
        numbers[f"{name}_null_sd"] = np.sqrt(np.maximum(variance, 0)) / scale
    return Likeness(a, b, shared_keys=shared, **numbers)


# --- inner products ---


def _query_key_products(a: _Operators, b: _Operators, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays [heads of a, heads of b]: <M_rest, M'_rest> + Re sum_t <M_t, M'_t>, and its mean and variance
    when the stream of b is turned in n dimensions. NaN for heads of different frequencies.
    """
    kinds_a = a.kinds()
    kinds_b = kinds_a if a is b else b.kinds()
    shape = (sum(len(block.heads) for block in a.blocks), sum(len(block.heads) for block in b.blocks))
    products, means, variances = (np.full(shape, np.nan) for _ in range(3))
    for of_a, rows in kinds_a:
        for of_b, columns_ in kinds_b:
            if not _equal_frequencies(of_a[0], of_b[0]):
                continue
            place = np.ix_(rows, columns_)
            rests = [[block.rest for block in blocks] for blocks in (of_a, of_b)]
            products[place] = _products(rests[0], None if of_a is of_b else rests[1]) + _rotary_products(of_a, of_b)
            means[place], variances[place] = _null(
                [[block.qk_moments for block in blocks] for blocks in (of_a, of_b)], n
            )
    return products, means, variances


def _rotary_products(of_a: list[_Block], of_b: list[_Block]) -> Float64[np.ndarray, "heads_a heads_b"]:
    """Return Re sum_t <M_t, M'_t> of all heads of blocks with equal frequencies: (q_t . q'_t) (k'_t . k_t), summed."""
    sides = []
    for blocks in (of_a, of_b):
        starts = np.cumsum([0, *(len(block.k) for block in blocks)])
        keys = torch.cat([block.keys + int(start) for block, start in zip(blocks, starts[:-1], strict=True)])
        sides.append((torch.cat([block.q for block in blocks]), torch.cat([block.k for block in blocks]), keys))
    (q_a, k_a, keys_a), (q_b, k_b, keys_b) = sides
    total = torch.zeros(len(q_a), len(q_b), dtype=torch.float64)
    for t in range(q_a.shape[1]):
        of_keys = (k_a[:, t].conj() @ k_b[:, t].T)[keys_a][:, keys_b]
        of_queries = q_a[:, t].conj() @ q_b[:, t].T
        total += of_queries.real * of_keys.real + of_queries.imag * of_keys.imag
    return total.numpy()


def _products(a: list[_Factors], b: list[_Factors] | None) -> Float64[np.ndarray, "heads_a heads_b"]:
    """Return <A, B> of all pairs of matrices A = left @ right; `a` and `b` hold (left, right) of some heads at a time.

    Some rows of the matrices are built at a time. This takes 2 d_model^2 operations for a pair; products of the d_head
    x d_head Gram matrices of the factors would take 4 d_head^2 d_model, which is more unless d_model > 2 d_head^2.
    `b` None: pairs within `a`, of which half is computed.
    """
    n_a, n_b = (sum(len(left) for left, _ in factors) for factors in (a, a if b is None else b))
    total = torch.zeros(n_a, n_b, dtype=torch.float64)
    if not any(left.shape[2] for left, _ in a):
        return total.numpy()
    d_model = a[0][0].shape[1]
    height = max(1, _SLAB_BYTES // (8 * d_model * (n_a + n_b)))
    for start in range(0, d_model, height):
        rows = slice(start, start + height)
        of_a = _rows_of_products(a, rows)
        if b is not None:
            total += of_a @ _rows_of_products(b, rows).T
            continue
        for first in range(0, n_a, _STRIPE):
            total[first : first + _STRIPE, first:] += of_a[first : first + _STRIPE] @ of_a[first:].T
    return (total if b is not None else total.triu() + total.triu(1).T).numpy()


def _rows_of_products(factors: list[_Factors], rows: slice) -> Float64[Tensor, "all_heads entries"]:
    """Return the rows `rows` of all matrices left @ right, a flat vector for each head."""
    d_model = factors[0][0].shape[1]
    height = len(range(d_model)[rows])
    slab = torch.empty(sum(len(left) for left, _ in factors), height, d_model, dtype=torch.float64)
    first = 0
    for left, right in factors:
        torch.matmul(left[:, rows], right, out=slab[first : (first := first + len(left))])
    return slab.flatten(1)


# --- the null: second moments over random turns of one stream ---


class _Moments(NamedTuple):
    """What the null needs of a head. With A_c the real matrices Re M_t, Im M_t and M_rest of a head:

    traces: tr A_c of each.
    products: three vectors, of tr A_c tr A_e, <A_c, A_e> and tr(A_c A_e) for all pairs (c, e), in a basis in which
        inner products are those of the vectors.
    """

    traces: Float64[Tensor, "heads matrices"]
    products: Float64[Tensor, "heads 3 pairs"]


def _moments(pairs: tuple[Tensor, Tensor] | None, left: Tensor, right: Tensor) -> _Moments:
    """Return the `_Moments` of heads from the rotary pairs (q, k), or None, and from M_rest = left @ right.

    From sums over M_t = q_t k_t^H: with X = tr(conj(M_t) M_s) and Y = tr(M_t M_s), the four products of real and
    imaginary parts have the inner product Re(X X'^* + Y Y'^*) / 2. The other kinds of products are alike.
    """
    core = right @ left
    rest_trace = core.diagonal(dim1=1, dim2=2).sum(1)
    both = ((left.mT @ left) * (right @ right.mT)).sum((1, 2))
    rest = torch.stack([rest_trace.square(), both, (core * core.mT).sum((1, 2))], dim=1)
    if pairs is None or not pairs[0].shape[1]:
        return _Moments(rest_trace[:, None], rest[:, :, None])
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
        [side @ columns_.to(side.dtype) for columns_ in (left, right.mT)] for side in (q, k.conj())
    )
    mixed = torch.stack([rest_trace[:, None] * trace, (q_left * k_right).sum(2), (q_right * k_left).sum(2)], dim=1)
    flat = [
        torch.view_as_real(part.flatten(2) * scale).flatten(2)
        for part, scale in ((x, 0.5**0.5), (y, 0.5**0.5), (mixed, 2**0.5))
    ]
    traces = torch.cat([trace.real, trace.imag, rest_trace[:, None]], dim=1)
    return _Moments(traces, torch.cat([*flat, rest[:, :, None]], dim=2))


def _null(moments: list[list[_Moments]], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and variance of sum_c <A_c, O B_c O^T> for all pairs of heads, O a random orthogonal n x n matrix.

    `moments` has those of model a and of model b, a list over blocks each. Exact (Weingarten calculus): the mean is
    sum_c tr A_c tr B_c / n. The second moment sums over the three ways to pair the four factors O.
    """
    a, b = (_Moments(*map(torch.cat, zip(*of_side, strict=True))) for of_side in moments)
    mean = a.traces @ b.traces.T / n
    same_pairing = torch.einsum("apf,bpf->ab", a.products, b.products)
    any_pairing = a.products.sum(1) @ b.products.sum(1).T
    second = ((n + 2) * same_pairing - any_pairing) / (n * (n - 1) * (n + 2))
    return mean.numpy(), (second - mean.square()).numpy()


def _variances_of_shared(block: _Block, n: int) -> Iterator[np.ndarray]:
    """Yield the variance of the product of two heads that read the same keys and values, [heads, heads]: of query-key
    operators when only the queries are turned, and of W_V W_O when only what is written is turned.

    Entries of heads that do not share keys have no meaning.
    """
    columns_ = [block.columns(head) for head in range(len(block.heads))]
    queries, keys = (torch.stack(side) for side in zip(*columns_, strict=True))
    pairs = 2 * len(block.frequencies)
    weights = keys.mT @ keys
    weights[:, :pairs] = weights[:, :, :pairs] = 0
    sizes = _squared(block.k)[block.keys]
    weights.diagonal(dim1=1, dim2=2)[:, :pairs] = torch.cat([sizes, sizes], dim=1)
    for weight, gram in (
        (weights, queries.mT @ queries),
        ((block.w_v.mT @ block.w_v)[block.keys], block.w_o @ block.w_o.mT),
    ):
        yield ((weight.mT @ gram @ weight).flatten(1) @ gram.flatten(1).T / n).numpy()


# --- a small record of operators, for models that are not in memory at the same time ---

_PROBES = 256  # their products are likenesses up to an error of some .06
_BEYOND_NOISE = 5.0  # standard errors


def operator_sketch(source: Source) -> pd.DataFrame:
    """Return a small record of the operators of each head, from which `same_basis` estimates likenesses.

    A head has 256 numbers u M v, with the same random vectors u and v for all heads, summed over rotary pairs by
    falling frequency with random phases, and 256 of W_V W_O. Both have mean square 1 for a random operator; a head
    without weights has 0. The table has `layer, head, sketch` (the numbers in float32, as base64).
    """
    rows = []
    with one_thread():
        operators = _read(source)
        generator = torch.Generator().manual_seed(0)
        u, v = torch.randn(2, _PROBES, operators.d_model, generator=generator, dtype=torch.float64)
        most = max(len(block.frequencies) for block in operators.blocks)
        phases = 2 * torch.pi * torch.rand(_PROBES, most, generator=generator, dtype=torch.float64)
        for block in operators.blocks:
            left, right = block.rest
            values = ((u @ left) * (v @ right.mT)).sum(2)
            if pairs := len(block.frequencies):
                turns = torch.polar(torch.full_like(phases, 2**0.5), phases)[:, :pairs]
                products = (u.to(block.q.dtype) @ block.q.mT) * (v.to(block.k.dtype) @ block.k[block.keys].mT).conj()
                values = values + (products * turns).real.sum(2)
            w_v, w_o = block.output
            sketches = values / block.norms[0][:, None], ((u @ w_v) * (v @ w_o.mT)).sum(2) / block.norms[1][:, None]
            rows.extend(torch.cat(sketches, dim=1).nan_to_num().to(torch.float32).numpy())
    table = pd.DataFrame(operators.heads, columns=["layer", "head"])
    return table.assign(sketch=[b64encode(row.tobytes()).decode() for row in rows])


def same_basis(a: pd.DataFrame, b: pd.DataFrame) -> tuple[bool, dict[str, str]]:
    """Return whether two records of `operator_sketch` show one basis, and which heads of a moved to another index in b.

    One basis: the mean likeness of heads of equal index is five standard errors above 0, or 5 % of the heads moved.
    Moved: a head whose nearest head in b has another index, a likeness above .5, and this head as its own nearest.
    """
    of_a, of_b = (
        np.stack([np.frombuffer(b64decode(row), dtype=np.float32) for row in table["sketch"]]).astype(float)
        for table in (a, b)
    )
    likeness = of_a @ of_b.T / of_a.shape[1]
    names_a, names_b = (list(map(head_name, table["layer"], table["head"])) for table in (a, b))
    own = np.array(names_a)[:, None] == np.array(names_b)
    noise = 1.4826 * np.median(np.abs(likeness[~own])) if not own.all() else 1.0
    moved = {}
    for number, nearest in enumerate(likeness.argmax(1)):
        value = likeness[number, nearest]
        beside = value - likeness[number, own[number]].max(initial=-1.0) > _BEYOND_NOISE * noise
        if beside and value > TWINS and likeness[:, nearest].argmax() == number:
            moved[names_a[number]] = names_b[nearest]
    together = own.any() and likeness[own].mean() > _BEYOND_NOISE * noise / own.sum() ** 0.5
    return bool(together or len(moved) >= _LEAST_SHARE * len(names_a)), moved
