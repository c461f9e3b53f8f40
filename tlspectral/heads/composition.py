"""How strongly an earlier head can feed a later one: K-, Q- and V-composition, from weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from einops import rearrange
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.heads.operators.factored import centred_output
from tlspectral.models.checkpoints.layers import layer_named
from tlspectral.models.opening import open_layers
from tlspectral.models.reading.layer import RawAttention, fold_attention, key_value_groups
from tlspectral.models.reading.view import AttentionView, heads_by_layer
from tlspectral.models.stream.writes import Input
from tlspectral.selection import Head, Receiver, head_name, head_receiver
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.schema import Schema, columns

if TYPE_CHECKING:
    from tlspectral.models.checkpoints.layers import Matrices, WeightFiles

COMPOSITION = columns("""
    score  | ratio | ||M OV^T|| / (||M|| ||OV||), OV of the earlier head and M of the one that reads; M^T for its
           |       | queries, its OV for its values.
    chance | ratio | 1 / sqrt(d_model): the score of operators with random frames.
    rank   | index | Rank of the score among all heads of all earlier layers; 1 is the strongest.
""")
K_COMPOSITION = Schema(
    "k_composition",
    (
        *HEAD,
        *columns("""
            receiver?       | label | What reads: the keys of a head (L18H6.k). This and the next two of all pairs.
            receiver_layer? | index | Layer of the head that reads.
            receiver_head?  | index | Index of the head that reads within its layer.
        """),
        *COMPOSITION,
    ),
    "`tls.k_composition`; layer and head are those of the earlier head",
)


def k_composition(model: Any, receiver: Head | Receiver | None = None) -> pd.DataFrame:
    """Score how strongly each head of an earlier layer can feed a receiver (Elhage et al. 2021; FP section 4).

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> tls.k_composition(model, "L1H0.k")["name"].iloc[0]  # what feeds its keys best
    'L0H3'
    >>> tls.k_composition(model).nlargest(3, "score")["name"].tolist()  # the strongest of all pairs of heads
    ['L0H3', 'L0H3', 'L0H3']

    `score = ||M OV^T|| / (||M|| ||OV||)` for the keys of a head, with M^T in place of M for its queries and
    `||OV_earlier OV_head||` for its values; Frobenius norms, from thin factors alone. M is norm-folded, and OV, like M,
    is centred under LayerNorm. Both belong to the head that is named, also where heads share keys and values.

    Args:
        model: a TransformerBridge or HookedTransformer, a model of transformers, or a name or path. A folder of
            safetensors or a hub model is read from its files, one layer's values and output at a time, without loading
            it (architectures: `models.checkpoints.layers.STREAMED_MODEL_TYPES`); other names are loaded.
        receiver: what a head reads: `"L5H1.k"`, `"L5H1.q"`, `"L5H1.v"` or a `Receiver`. A head alone, "L5H1", (5, 1) or
            a table row, means its keys. None: the keys of every head, all pairs in one pass over the layers, with the
            numbers of a call for each receiver. The pass holds W_K of all layers in float64 and d_head x d_head numbers
            of every head: 35 MB for SmolLM2-135M, 1.2 GB for Llama-3-8B.

    Returns:
        DataFrame, best first; empty for a receiver in layer 0. For all pairs it has a row per sender and receiver: the
        receivers in the order of the model, the senders of each best first.
        Columns: `layer, head, name, receiver?, receiver_layer?, receiver_head?, score, chance, rank`.
        `attrs` hold where the model came from, with hashes of the (last) receiver's layer and all earlier ones.

    Raises:
        BadHead: no such head, or keys or values of a group (`"L5KV0.k"`), which have several operators.
        BadWeights, UnsupportedArchitecture: a layer cannot be read.

    What it does not establish: that the path is used. The score sees weights, not what is on the residual stream, and
    the number of heads to be ranked among grows with the layer. `chance` is a typical value without its spread, and no
    threshold. The gain of a norm behind the attention (Gemma 2 and 3, OLMo 2) or on the stream (GPT, OPT 350M, BERT),
    which weighs what a head writes, is left out.
    """
    end = None if receiver is None else head_receiver(receiver)
    with open_layers(model) as source:
        chosen = heads_by_layer(source, None if end is None else [end])
        what: Input = "k" if end is None else end.input
        matrices: Matrices = "output" if what == "v" else "query-key"
        layers = [index for index in source.layers if index <= max(chosen)]
        if not isinstance(source, AttentionView):
            source.prepare(chosen, matrices)
            source.prepare(layers[:-1], "output")
        readings: dict[int, _Readings] = {}
        found = []
        with one_thread():
            # The last layer first: what is held are readings, of which heads share a part, and one layer's writes.
            for index in reversed(layers):
                if readings:
                    with raw_layer(source, index, "output") as raw:
                        written = _written(raw, index)
                    found += [
                        (later, index, _scores(written, of_later).numpy()) for later, of_later in readings.items()
                    ]
                if index in chosen:
                    with raw_layer(source, index, matrices) as raw:
                        readings[index] = _readings(raw, index, chosen[index], what)
        table = _ranked(found, chosen).assign(chance=source.d_model**-0.5)
        if end is None:
            names = [
                f"{head_name(*pair)}.k" for pair in zip(table["receiver_layer"], table["receiver_head"], strict=True)
            ]
            table.insert(0, "receiver", names)
        else:
            table = table.drop(columns=["receiver_layer", "receiver_head"])
        return K_COMPOSITION.frame(table, source.origin(range(layers[-1] + 1)))


def _ranked(
    found: list[tuple[int, int, Float64[np.ndarray, "receivers heads"]]], chosen: dict[int, list[int]]
) -> pd.DataFrame:
    """Return a row for each score, of a layer of receivers and an earlier layer, the senders of a receiver ranked."""
    places = [np.empty((4, 0), dtype=np.int64)]
    for receiver_layer, layer, scores in found:
        receivers = np.array(chosen[receiver_layer])[:, None]
        ends = np.broadcast_arrays(receiver_layer, receivers, layer, np.arange(scores.shape[1]))
        places.append(np.stack(ends).reshape(4, -1))
    of_receiver = ["receiver_layer", "receiver_head"]
    table = pd.DataFrame(np.concatenate(places, axis=1).T, columns=[*of_receiver, "layer", "head"])
    table["score"] = np.concatenate([np.empty(0), *(scores.ravel() for _, _, scores in found)])
    table = table.sort_values(
        [*of_receiver, "score", "layer", "head"], ascending=[True, True, False, True, True], ignore_index=True
    )
    return table.assign(rank=table.groupby(of_receiver).cumcount() + 1)


@contextmanager
def raw_layer(source: AttentionView | WeightFiles, index: int, matrices: Matrices) -> Iterator[RawAttention]:
    """Yield the parameters of a layer of a model, or with these matrices of its files; valid in the context."""
    if isinstance(source, AttentionView):
        yield source.raw(index)
    else:
        with source.layer(index, matrices) as view, layer_named(index):
            yield view.raw(0)


def composition_into(
    view: AttentionView, layer: int, heads: list[int], what: Input, earlier: Iterable[int]
) -> dict[int, Float64[Tensor, "receivers heads"]]:
    """Return the scores of `k_composition` of all heads of some earlier layers with heads of one layer, by layer.

    `heads` ascend.
    """
    with one_thread():
        readings = _readings(view.raw(layer), layer, heads, what)
        return {index: _scores(_written(view.raw(index), index), readings) for index in earlier}


class _Readings(NamedTuple):
    """The operators by which heads of a layer read the stream, of norm 1, an orthogonal factor on the right left out.

    They are `factor @ triangle^T`, a factor and the triangles of the heads that share it. Factors stand side by side.
    """

    factors: Float64[Tensor, "d_model columns"]
    triangles: list[Float64[Tensor, "receivers m d_head"]]


def _readings(raw: RawAttention, layer: int, heads: list[int], what: Input) -> _Readings:
    """Return how some heads of a layer, ascending, read the stream."""
    factors, triangles = [], []
    for group_heads, group in key_value_groups(raw):
        asked = [head - group_heads.start for head in heads if group_heads.start <= head < group_heads.stop]
        if not asked:
            continue
        if what == "v":
            output = centred_output(group, layer)
            shared, other = output.w_v, output.w_o[asked].mT
        else:
            w_q, w_k = fold_attention(group, layer).operator_factors()
            shared, other = (w_k[:1], w_q[asked]) if what == "k" else (w_q[asked], w_k[:1])
        triangle = _triangle(other)
        sizes = torch.linalg.matrix_norm(_triangle(shared) @ triangle.mT)
        triangle = triangle / sizes[:, None, None]
        factors += [*shared]
        triangles += [triangle] if len(shared) == 1 else triangle.split(1)
    return _Readings(torch.cat(factors, dim=1), triangles)


def _triangle(factor: Float64[Tensor, "heads rows columns"]) -> Float64[Tensor, "heads m columns"]:
    return torch.linalg.qr(factor, mode="r").R


def _written(raw: RawAttention, layer: int) -> Float64[Tensor, "heads m d_model"]:
    """Return what each head of a layer writes: OV, of norm 1, an orthogonal factor on the left left out."""
    written = []
    for _, group in key_value_groups(raw):  # one group in float64 at a time
        output = centred_output(group, layer)
        written.append(_triangle(output.w_v) @ output.w_o)
    joined = torch.cat(written)
    return joined / torch.linalg.matrix_norm(joined)[:, None, None]


def _scores(written: Float64[Tensor, "heads m d_model"], readings: _Readings) -> Float64[Tensor, "receivers heads"]:
    """Return `||M OV^T||` of every head of a layer with every receiver, both of norm 1."""

    def times(left: Tensor, right: Tensor) -> Tensor:
        return torch.bmm(left, right.expand(len(left), -1, -1))  # by head: equal heads have equal scores to the bit

    d_head = readings.triangles[0].shape[-1]
    scores = []
    for read, triangles in zip(times(written, readings.factors).split(d_head, 2), readings.triangles, strict=True):
        joined = rearrange(triangles, "receiver row d_head -> (receiver row) d_head")
        product = rearrange(
            times(read, joined.T), "head m (receiver row) -> head m receiver row", receiver=len(triangles)
        )
        scores.append(torch.linalg.vector_norm(product, dim=(1, 3)).T)
    return torch.cat(scores)
