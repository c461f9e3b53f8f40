"""How far the query-key and output-value operators of two models differ, head by head.

Differences are computed from thin factors in float64. With M = q k^T of each model,

    M_a - M_b = [q_a, q_a - q_b] [k_a - k_b, k_b]^T,

which is exactly 0 where nothing changed, and precise where little changed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Complex128, Float64
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.algebra.rotary import pairs_and_rest
from tlspectral.errors import UnsupportedArchitecture
from tlspectral.heads.composition import raw_layer
from tlspectral.heads.likeness import likeness_of
from tlspectral.heads.operators.factored import centred_output
from tlspectral.models.reading.layer import AttentionLayer, RawAttention, fold_attention, key_value_groups
from tlspectral.models.reading.view import AttentionView, vocabulary_chunks

if TYPE_CHECKING:
    from tlspectral.models.checkpoints.layers import WeightFiles

    Source = AttentionView | WeightFiles

LEAST_LIKENESS = 0.2
"""Two models whose embeddings have a cosine of this value or more share a basis, whatever their heads."""

_ROUNDING = 1e-6  # relative; other programs fold norms and compute frequencies in float32


@dataclass(frozen=True)
class OperatorChanges:
    """The differences between the operators of models a and b, from `operator_changes`.

    Attributes:
        table: `layer, head, qk_change, ov_change, counterpart, counterpart_likeness`, a row for each head that both
            models have (the last two: `Likeness.counterparts`). `qk_change` is the norm
            of the difference of the query-key operators over the norm in model a; `ov_change` is the same ratio for W_V
            W_O.
        likeness: cosines between a and b: "embedding" (without its mean over tokens; missing where it cannot be
            compared), "qk" and "ov" (means over heads).
        outside: differences that no operator contains, such as "rotary frequencies", and the layers that have them.
        moved: heads of a that stand at another index in b: their names in b by their names in a.
    """

    table: pd.DataFrame
    likeness: dict[str, float]
    outside: dict[str, list[int]]
    moved: dict[str, str]


def operator_changes(a: "Source", b: "Source") -> OperatorChanges:
    """Return how much the query-key operator and W_V W_O of every head differ between models a and b, as
    `OperatorChanges`.

    `a` and `b` are an `AttentionView` of a loaded model or `WeightFiles`. The result has `.table` (`layer, head,
    qk_change, ov_change`), `.likeness` (cosines between the models) and `.outside` (differences that no operator
    contains). Raises ValueError if the models have no layer in common, layers of different sizes, or no common basis
    (`Likeness.common_basis`, and a cosine of the embeddings below 0.2); UnsupportedArchitecture or BadWeights if a
    layer cannot be read.
    """
    names = f"{a.source['model']} (a) and {b.source['model']} (b)"
    layers = sorted({*a.layers} & {*b.layers})
    if not layers:
        raise ValueError(
            f"{names} have no layer with attention in common: layers {a.layers} and {b.layers}; give a model and a "
            "changed copy of it"
        )
    for source in (a, b):
        if not isinstance(source, AttentionView):
            source.prepare(layers, "query-key")
            source.prepare(layers, "output")
    rows, outside = [], {}
    with one_thread():
        for index in layers:
            columns, outside_of_layer = _layer_changes(a, b, index, names)
            rows.append(pd.DataFrame({"layer": index, "head": np.arange(len(columns["qk_change"])), **columns}))
            for name in outside_of_layer:
                outside.setdefault(name, []).append(index)
    table = pd.concat(rows, ignore_index=True)
    likeness = _embedding_likeness(a, b)
    likeness |= {name: float(table.pop(f"{name}_cosine").dropna().mean()) for name in ("qk", "ov")}
    pairs = likeness_of(a, b)
    if not (likeness.get("embedding", 0.0) >= LEAST_LIKENESS or pairs.common_basis):
        cosines = ", ".join(f"{name} {value:.2f}" for name, value in likeness.items())
        raise ValueError(
            f"{names} share no common basis: no head of a is like any head of b (cosines at equal index: {cosines}), "
            "as in two trainings from scratch, so heads of one index have nothing to do with each other. Give a model "
            "and a changed copy of it. heads.side_by_side(a, b) sets the detectors of both beside each other"
        )
    counterparts, moved = pairs.counterparts()
    return OperatorChanges(table.merge(counterparts, on=["layer", "head"]), likeness, outside, moved)


def _layer_changes(
    a: "Source", b: "Source", index: int, names: str
) -> tuple[dict[str, Float64[np.ndarray, "heads"]], list[str]]:
    """Return the changes of the heads of layer `index` from model a to model b, and the names of differences that no
    operator contains.

    `a` and `b` are an `AttentionView` or `WeightFiles`. The changes are a dict of arrays [heads]: `qk_change`,
    `qk_cosine`, `ov_change`, `ov_cosine`. `names` names both models in messages. Raises ValueError for layers of
    different sizes.
    """
    qk, ov, biases = [], [], []
    with raw_layer(a, index, "query-key") as raw_a, raw_layer(b, index, "query-key") as raw_b:
        _require_one_size(raw_a, raw_b, index, names)
        for group_a, group_b in _groups(raw_a, raw_b):  # one group in float64 at a time
            factors = [_Factors.of_layer(fold_attention(group, index)) for group in (group_a, group_b)]
            qk.append(_squares(*factors))
            with_biases = ((_TOKENS, _BIAS), (_BIAS, _TOKENS), (_BIAS, _BIAS))
            squares = [_all_squares(*(side.rows(*place) for side in factors))[2] for place in with_biases]
            biases.append(torch.stack(squares).sum(0) / qk[-1][0])
        outside = _settings_that_differ(raw_a, raw_b)
    if bool((torch.cat(biases) > _ROUNDING**2).any()):
        outside.append("biases of queries and keys")
    with raw_layer(a, index, "output") as raw_a, raw_layer(b, index, "output") as raw_b:
        for group_a, group_b in _groups(raw_a, raw_b):
            outputs = [centred_output(group, index) for group in (group_a, group_b)]
            ov.append(
                _product_squares(*((output.w_v.expand(len(output.w_o), -1, -1), output.w_o.mT) for output in outputs))
            )
        if isinstance(a, AttentionView) and isinstance(b, AttentionView) and _gates_differ(raw_a, raw_b):
            outside.append("gate of the output")
    columns = {}
    for name, of_groups in (("qk", qk), ("ov", ov)):
        of_a, of_b, of_difference = (torch.cat(squares) for squares in zip(*of_groups, strict=True))
        columns[f"{name}_change"] = (of_difference / of_a).sqrt().numpy()
        columns[f"{name}_cosine"] = ((of_a + of_b - of_difference) / (2 * (of_a * of_b).sqrt())).numpy()
    return columns, outside


def _groups(a: RawAttention, b: RawAttention) -> Iterator[tuple[RawAttention, RawAttention]]:
    """Yield the parameters of a layer by groups of heads that share keys: pairs (group of a, same group of b)."""
    yield from ((of_a, of_b) for (_, of_a), (_, of_b) in zip(key_value_groups(a), key_value_groups(b), strict=True))


def _require_one_size(a: RawAttention, b: RawAttention, index: int, names: str) -> None:
    """Raise ValueError if layer `index` has other numbers of heads, dimensions or rotary pairs in model a than in model
    b.

    `a` and `b` are the parameters of the layer. `names` names both models in the message.
    """
    sizes_of_models = []
    for raw in (a, b):
        group = fold_attention(next(group for _, group in key_value_groups(raw)), index)
        pairs = 0 if group.rotary is None else group.rotary.n_pairs
        sizes_of_models.append((len(raw.w_q), len(raw.w_k), group.d_model, group.d_head, pairs))
    if sizes_of_models[0] != sizes_of_models[1]:
        sizes = [
            f"{heads} heads, {keys} of keys, d_model {d_model}, d_head {d_head}, {pairs} rotary pairs"
            for heads, keys, d_model, d_head, pairs in sizes_of_models
        ]
        raise ValueError(
            f"{names} differ in architecture: layer {index} has {sizes[0]} in a, {sizes[1]} in b; give a model and a "
            "changed copy of it. tls.head_likeness(a, b, nearest=1) finds heads of a pruned model again"
        )


# --- queries and keys ---


@dataclass(frozen=True)
class _Factors:
    """W_Q and W_K of heads with the norms folded in, divided into rotary pairs and columns that do not rotate.

    The last row of every factor is the bias: factors act on tokens with a 1 appended.

    Attributes:
        pairs: the complex rotary pairs of W_Q and of W_K.
        still: the columns of W_Q and of W_K that do not rotate.
    """

    pairs: tuple[Complex128[Tensor, "heads pairs queries"], Complex128[Tensor, "heads pairs keys"]]
    still: tuple[Float64[Tensor, "heads queries columns"], Float64[Tensor, "heads keys columns"]]

    @classmethod
    def of_layer(cls, layer: AttentionLayer) -> "_Factors":
        """Return the `_Factors` of a folded layer: W_Q and W_K of all query heads, with the biases as last rows."""
        wide = replace(
            layer,
            w_q=torch.cat([layer.w_q, layer.b_q[:, None]], dim=1),
            w_k=torch.cat([layer.w_k, layer.b_k[:, None]], dim=1),
        )
        factors = wide.operator_factors()
        return cls(*zip(*(pairs_and_rest(factor, layer.rotary) for factor in factors), strict=True))

    def rows(self, query: slice, key: slice) -> "_Factors":
        """Return new `_Factors` with only the rows `query` of W_Q and the rows `key` of W_K."""
        (pairs_q, pairs_k), (still_q, still_k) = self.pairs, self.still
        return _Factors((pairs_q[..., query], pairs_k[..., key]), (still_q[:, query], still_k[:, key]))


_TOKENS, _BIAS = slice(None, -1), slice(-1, None)


def _squares(a: _Factors, b: _Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors [heads]: the squared operator norm of each head, sum_t ||M_t||^2 + ||M_rest||^2, for a, for
    b and for a - b.

    M_t is the operator of rotary pair t, M_rest the operator of the columns that do not rotate. Biases are left out.
    """
    return _all_squares(a.rows(_TOKENS, _TOKENS), b.rows(_TOKENS, _TOKENS))


def _all_squares(a: _Factors, b: _Factors) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum_t ||M_t||^2 + ||M_rest||^2 of each head for a, for b and for a - b, three tensors [heads], over all
    rows that the factors have. M_t is the operator of rotary pair t, M_rest the operator of the columns that do not
    rotate.
    """
    # M_t = w_q conj(w_k)^T: an operator of its own for each pair.
    (left_a, right_a), (left_b, right_b) = a.pairs, b.pairs
    rotated = _product_squares((left_a[..., None], right_a[..., None]), (left_b[..., None], right_b[..., None]))
    of_a, of_b, of_difference = (
        pairs.sum(1) + rest for pairs, rest in zip(rotated, _product_squares(a.still, b.still), strict=True)
    )
    return of_a, of_b, of_difference


def _product_squares(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors: the squared Frobenius norms of `left @ right^H` of a, of b, and of their difference.

    `a` and `b` are pairs (left, right) of batches of matrices; there is one number for each matrix of the batch.
    """
    (left_a, right_a), (left_b, right_b) = a, b
    difference = torch.cat([left_a, left_a - left_b], dim=-1), torch.cat([right_a - right_b, right_b], dim=-1)
    return _product_square(*a), _product_square(*b), _product_square(*difference)


def _product_square(left: Tensor, right: Tensor) -> Float64[Tensor, "*batch"]:
    """Return the squared Frobenius norm of `left @ right^H`, one number for each matrix of the batch."""
    if not left.shape[-1] or not left.numel():
        return left.real.new_zeros(left.shape[:-2])
    # From triangles: Gram matrices would lose half of the digits where the terms cancel.
    left, right = (torch.linalg.qr(factor, mode="r").R for factor in (left, right))
    return (left @ right.mH).abs().square().sum((-2, -1))


# --- what no operator holds ---


def _settings_that_differ(a: RawAttention, b: RawAttention) -> list[str]:
    """Return the names of settings that differ between layers a and b, such as "rotary frequencies" or "softcap of
    scores".

    Only settings that change scores and are not in the operators are compared.
    """
    differing = []
    if a.rotary is not None and b.rotary is not None:
        theta_a, theta_b = a.rotary.theta, b.rotary.theta
        if theta_a.shape != theta_b.shape or not torch.allclose(theta_a, theta_b, rtol=_ROUNDING, atol=0):
            differing.append("rotary frequencies")
        if _apart(a.rotary.attention_scaling, b.rotary.attention_scaling):
            differing.append("scaling of rotated queries and keys")
    if _apart(a.score_scale, b.score_scale):
        differing.append("scale of scores")
    if (a.softcap is None) != (b.softcap is None) or _apart(a.softcap or 0.0, b.softcap or 0.0):
        differing.append("softcap of scores")
    if (a.alibi and a.alibi.slopes) != (b.alibi and b.alibi.slopes):
        differing.append("slopes of ALiBi")
    if any(type(getattr(a, name)) is not type(getattr(b, name)) for name in ("q_norm", "k_norm")):
        differing.append("norm of queries or keys")
    return differing


def _apart(a: float, b: float) -> bool:
    """Return True if `a` and `b` differ by more than 1e-6 of the larger one."""
    return abs(a - b) > _ROUNDING * max(abs(a), abs(b))


def _gates_differ(a: RawAttention, b: RawAttention) -> bool:
    """Return True if the attention outputs of layers a and b have gates (W_gate, b_gate) that differ by more than
    rounding, or only one layer has a gate.
    """
    for of_a, of_b in ((a.w_gate, b.w_gate), (a.b_gate, b.b_gate)):
        if (of_a is None) != (of_b is None):
            return True
        if of_a is not None and of_b is not None:
            gate_a, gate_b = (_with_gain(gate.detach().cpu().double(), raw) for gate, raw in ((of_a, a), (of_b, b)))
            if gate_a.shape != gate_b.shape or bool((gate_a - gate_b).norm() > _ROUNDING * gate_a.norm()):
                return True
    return False


def _with_gain(gate: Tensor, raw: RawAttention) -> Tensor:
    """Return a gate's weight times the gain of the layer's input norm (from `raw`), as a new tensor; a bias is returned
    unchanged.
    """
    gain = raw.norm.gain
    return gate if gain is None or gate.ndim < 3 else gate * gain.detach().cpu().double()[:, None]


# --- embeddings ---


def _embedding_likeness(a: "Source", b: "Source") -> dict[str, float]:
    """Return {"embedding": cosine of the embeddings of models a and b}, each without its mean over the vocabulary.

    `a` and `b` are an `AttentionView` or `WeightFiles`. The dict is empty where the embeddings cannot be compared:
    other sizes, models read from files, or an embedding of 0.
    """
    if not (isinstance(a, AttentionView) and isinstance(b, AttentionView)):
        return {}
    try:
        embeddings = a.embedding(), b.embedding()
    except UnsupportedArchitecture:
        return {}
    if embeddings[0].shape != embeddings[1].shape:
        return {}
    products: Any = torch.zeros(3, dtype=torch.float64)
    totals = torch.zeros(2, embeddings[0].shape[1], dtype=torch.float64)
    for pieces in zip(*(vocabulary_chunks(embedding, axis=0) for embedding in embeddings), strict=True):
        of_a, of_b = (piece.cpu() for piece in pieces)
        products += torch.stack([(of_a * of_b).sum(), of_a.square().sum(), of_b.square().sum()])
        totals += torch.stack([of_a.sum(0), of_b.sum(0)])
    means = torch.stack([totals[0] @ totals[1], totals[0] @ totals[0], totals[1] @ totals[1]]) / len(embeddings[0])
    product, alone_a, alone_b = (products - means).tolist()
    return {"embedding": product / (alone_a * alone_b) ** 0.5} if alone_a > 0 < alone_b else {}
