"""Whether two heads are the same head: the likeness of their operators, whatever basis the weights are written in.

The likeness of two query-key operators is <M_rest, M'_rest> + Re sum_t <M_t, M'_t> over both norms. M_t is the complex
operator of a rotary pair, and pairs are matched by frequency; M_rest are the columns that do not rotate. The null turns
the residual stream of the second head at random (Haar). Its standard deviation is exact: second moments of orthogonal
matrices (Weingarten calculus), no draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float64
from torch import Tensor

from tlspectral.algebra.nulls import block_generator, haar_blocks, one_thread
from tlspectral.algebra.turned_stream import null_of_products, turned_products
from tlspectral.errors.settings import checked_settings, counted
from tlspectral.heads.operator_blocks import ROUNDING, Block, Factors, Operators, equal_frequencies, read_operators
from tlspectral.models.opening import open_layers
from tlspectral.selection.node_names import head_name
from tlspectral.tables.schema import Schema, columns

if TYPE_CHECKING:
    from tlspectral.heads.operator_blocks import Source

TWINS = 0.5
"""Two heads are twins if the likeness of their query-key operators is above this level."""

BEYOND_NULL = 10.0
"""A likeness this many standard deviations above the mean of its null shows that both heads read one basis."""

LEAST_SHARE = 0.05
"""Share of the heads that need a counterpart beyond the null: single heads can be as far by chance."""

ALL_PAIRS = 300
"""With more heads than this, a table has the nearest heads of each head instead of all pairs."""

_NEAREST = 10  # rows per head of such a table
_CHECKED_PAIRS = 64  # pairs that are turned at random to check the exact standard deviations
_SLAB_BYTES = 2**27
_STRIPE = 32  # heads of a stripe of the upper triangle of all pairs

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
        draws: random turns of the residual stream, which check the `_null_sd` columns; 0: no check.
        nearest: number of most alike heads listed for each head of `a`. Default: all pairs up to 300 heads in a model,
            else 10.
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
    heads read one residual stream, so the likeness has no p. More: docs/two_models.md.
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

    a: Operators
    b: Operators
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
        return bool(beyond.any(1).mean() >= LEAST_SHARE)

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
            if own is not None and nearness[number, own] > nearness[number, nearest] - ROUNDING:
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
            products = turned_products(q.T @ turn @ other_q, k.T @ turn @ other_k, pairs)
            norms = block_a.norms[0][row_a] * block_b.norms[0][row_b]
            deviations.append((products / norms - self.qk_mean[i, j]) / self.qk_null_sd[i, j])
        drawn = torch.cat(deviations)
        return {
            "pairs": len(chosen),
            "draws": draws,
            "rms": float(drawn.square().mean().sqrt()),
            "largest": float(drawn.abs().max()),
        }


def likeness_of(source_a: Source, source_b: Source | None = None) -> Likeness:
    """Return the `Likeness` of all heads of two open models, or of one model with itself.

    Raises ValueError for models of different d_model.
    """
    with one_thread():
        a = read_operators(source_a)
        b = a if source_b is None else read_operators(source_b)
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
        of_a, of_b = ([block.ov_moments for block in side.blocks] for side in (a, b))
        ov_mean, ov_variance = null_of_products(of_a, of_b, n)
        shared = np.zeros(qk.shape, dtype=bool)
        first = 0
        for block in a.blocks if a is b else []:
            rows = slice(first, first := first + len(block.heads))
            same = shared[rows, rows] = (block.keys[:, None] == block.keys).fill_diagonal_(False).numpy()
            for mean, variance, own in zip(
                (qk_mean, ov_mean), (qk_variance, ov_variance), block.variances_of_shared(n), strict=True
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


def _query_key_products(a: Operators, b: Operators, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays [heads of a, heads of b]: <M_rest, M'_rest> + Re sum_t <M_t, M'_t>, and its mean and variance
    when the stream of b is turned in n dimensions. NaN for heads of different frequencies.
    """
    kinds_a = a.kinds()
    kinds_b = kinds_a if a is b else b.kinds()
    shape = (sum(len(block.heads) for block in a.blocks), sum(len(block.heads) for block in b.blocks))
    products, means, variances = (np.full(shape, np.nan) for _ in range(3))
    for of_a, rows in kinds_a:
        for of_b, columns_ in kinds_b:
            if not equal_frequencies(of_a[0], of_b[0]):
                continue
            place = np.ix_(rows, columns_)
            rests = [[block.rest for block in blocks] for blocks in (of_a, of_b)]
            products[place] = _products(rests[0], None if of_a is of_b else rests[1]) + _rotary_products(of_a, of_b)
            one, other = ([block.qk_moments for block in blocks] for blocks in (of_a, of_b))
            means[place], variances[place] = null_of_products(one, other, n)
    return products, means, variances


def _rotary_products(of_a: list[Block], of_b: list[Block]) -> Float64[np.ndarray, "heads_a heads_b"]:
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


def _products(a: list[Factors], b: list[Factors] | None) -> Float64[np.ndarray, "heads_a heads_b"]:
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


def _rows_of_products(factors: list[Factors], rows: slice) -> Float64[Tensor, "all_heads entries"]:
    """Return the rows `rows` of all matrices left @ right, a flat vector for each head."""
    d_model = factors[0][0].shape[1]
    height = len(range(d_model)[rows])
    slab = torch.empty(sum(len(left) for left, _ in factors), height, d_model, dtype=torch.float64)
    first = 0
    for left, right in factors:
        torch.matmul(left[:, rows], right, out=slab[first : (first := first + len(left))])
    return slab.flatten(1)
