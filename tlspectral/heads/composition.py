"""How strongly an earlier head can feed keys, queries or values of a later head, from weights: composition scores."""

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
from tlspectral.models.reading.heads_of_model import heads_by_layer, one_head
from tlspectral.models.reading.layer import RawAttention, fold_attention, key_value_groups
from tlspectral.models.reading.view import AttentionView
from tlspectral.models.stream.writes import Input
from tlspectral.selection.heads_as_written import Head
from tlspectral.selection.node_names import Receiver, head_name
from tlspectral.selection.receivers_as_written import head_and_input
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
    """Score how strongly each earlier head can feed a receiver, from weights (Elhage et al. 2021).

    Use it to look for candidates before you cut edges: which head may write what this head's keys read?

    >>> import tlspectral as tls
    >>> model = tls.load_model("tiny-rope")
    >>> tls.k_composition(model, "L1H0.k")["name"].iloc[0]  # the head that feeds its keys best
    'L0H3'
    >>> tls.k_composition(model).nlargest(3, "score")["name"].tolist()  # senders of the top three pairs
    ['L0H3', 'L0H3', 'L0H3']

    Args:
        model: a TransformerBridge or HookedTransformer, a model of transformers, or a name or path. Folders of
            safetensors and hub models are read layer by layer, without loading.
        receiver: the input that is fed: `"L5H1.k"` (keys), `"L5H1.q"` (queries) or `"L5H1.v"` (values). A head alone
            ("L5H1", (5, 1), a table row) means its keys. Default: the keys of every head, all pairs in one pass.

    Returns:
        DataFrame with a row per sender (`layer, head, name`), best first; empty for a receiver in layer 0. With
        `receiver=None`: a row per sender and receiver, receivers in the order of the model. Columns (`?`: not in every
        table): `layer, head, name, receiver?, receiver_layer?, receiver_head?, score, chance, rank`. `score`, between 0
        and 1, is ||M OV^T|| / (||M|| ||OV||) with Frobenius norms: M is the receiver's query-key operator (for queries
        its transpose, for values its own W_V W_O), OV the sender's W_V W_O. `chance` = 1 / sqrt(d_model) is the score
        of random operators. `rank` is 1 for the best sender of a receiver. `attrs` hold where the model came from, with
        hashes of the layers read.

    Raises:
        BadHead: the head does not exist, or the receiver is a group of heads (`"L5KV0.k"`), which has several
            operators.
        BadWeights, UnsupportedArchitecture: a layer cannot be read.

    Not established: that the path is used. The score sees weights, not the activations of a run. `chance` has no
    spread: it is not a threshold. More: docs/wiring.md.
    """
    asked, read = (None, "k") if receiver is None else head_and_input(receiver)
    with open_layers(model) as source:
        chosen = heads_by_layer(source, None if asked is None else [one_head(source, asked)])
        matrices: Matrices = "output" if read == "v" else "query-key"
        layers = [index for index in source.layers if index <= max(chosen)]
        if not isinstance(source, AttentionView):
            source.prepare(chosen, matrices)
            source.prepare(layers[:-1], "output")
        readings: dict[int, _Readings] = {}
        scores_of_layers = []
        with one_thread():
            # From the last layer down: memory then holds what later layers read (small), and the writes of one layer.
            for index in reversed(layers):
                if readings:
                    with raw_layer(source, index, "output") as raw:
                        writes = _written(raw, index)
                    scores_of_layers += [
                        (later, index, _scores(writes, of_later).numpy()) for later, of_later in readings.items()
                    ]
                if index in chosen:
                    with raw_layer(source, index, matrices) as raw:
                        readings[index] = _readings(raw, index, chosen[index], read)
        table = _ranked(scores_of_layers, chosen).assign(chance=source.d_model**-0.5)
        if asked is None:
            names = [
                f"{head_name(*pair)}.k" for pair in zip(table["receiver_layer"], table["receiver_head"], strict=True)
            ]
            table.insert(0, "receiver", names)
        else:
            table = table.drop(columns=["receiver_layer", "receiver_head"])
        return K_COMPOSITION.frame(table, source.origin(range(layers[-1] + 1)))


def _ranked(
    scores_of_layers: list[tuple[int, int, Float64[np.ndarray, "receivers heads"]]], chosen: dict[int, list[int]]
) -> pd.DataFrame:
    """Return a table with a row per score; the senders of each receiver are sorted by falling score and ranked from 1.

    `scores_of_layers` has (layer of the receivers, layer of the senders, scores [receivers, senders]) for each pair of
    layers; `chosen` has the receivers' heads by layer. Columns: receiver_layer, receiver_head, layer, head, score,
    rank.
    """
    places = [np.empty((4, 0), dtype=np.int64)]
    for receiver_layer, layer, scores in scores_of_layers:
        receivers = np.array(chosen[receiver_layer])[:, None]
        ends = np.broadcast_arrays(receiver_layer, receivers, layer, np.arange(scores.shape[1]))
        places.append(np.stack(ends).reshape(4, -1))
    of_receiver = ["receiver_layer", "receiver_head"]
    table = pd.DataFrame(np.concatenate(places, axis=1).T, columns=[*of_receiver, "layer", "head"])
    table["score"] = np.concatenate([np.empty(0), *(scores.ravel() for _, _, scores in scores_of_layers)])
    table = table.sort_values(
        [*of_receiver, "score", "layer", "head"], ascending=[True, True, False, True, True], ignore_index=True
    )
    return table.assign(rank=table.groupby(of_receiver).cumcount() + 1)


@contextmanager
def raw_layer(source: AttentionView | WeightFiles, index: int, matrices: Matrices) -> Iterator[RawAttention]:
    """Open layer `index` of a loaded model or of weight files (`source`): yield its parameters, a `RawAttention` (W_Q,
    W_K, W_V, W_O, biases, norms).

    `matrices` says which weights are read from files: "query-key" (W_Q, W_K) or "output" (W_V, W_O). Weights read from
    files are freed when the `with` block ends.
    """
    if isinstance(source, AttentionView):
        yield source.raw(index)
    else:
        with source.layer(index, matrices) as view, layer_named(index):
            yield view.raw(0)


def composition_into(
    view: AttentionView, layer: int, heads: list[int], read: Input, earlier: Iterable[int]
) -> dict[int, Float64[Tensor, "receivers heads"]]:
    """Return the composition scores of some heads of layer `layer` with all heads of each earlier layer in `earlier`.

    `view` is the open model. `heads` are the receivers, ascending. `read` is the input that is fed: "q", "k" or "v". A
    score is ||M OV^T|| / (||M|| ||OV||), with M the operator by which the receiver reads and OV the sender's W_V W_O.
    The result is a dict from earlier layer to a tensor [receivers, senders].
    """
    with one_thread():
        readings = _readings(view.raw(layer), layer, heads, read)
        return {index: _scores(_written(view.raw(index), index), readings) for index in earlier}


class _Readings(NamedTuple):
    """The operators by which some heads of a layer read the residual stream: `factor @ triangle^T`, scaled to norm 1.

    An orthogonal matrix on the right is left out, because it does not change a norm.

    Attributes:
        factors: the factors of all groups of heads that share keys, side by side.
        triangles: for each factor, the triangular matrices R of the heads that use it.
    """

    factors: Float64[Tensor, "d_model columns"]
    triangles: list[Float64[Tensor, "receivers m d_head"]]


def _readings(raw: RawAttention, layer: int, heads: list[int], read: Input) -> _Readings:
    """Return the operators by which `heads` (ascending) of layer `layer` read the residual stream, scaled to norm 1, as
    `_Readings` (`.factors`, `.triangles`).

    `raw` has the parameters of the layer. `read` is the input of a head: "q", "k" or "v".
    """
    factors, triangles = [], []
    for group_heads, group in key_value_groups(raw):
        rows = [head - group_heads.start for head in heads if group_heads.start <= head < group_heads.stop]
        if not rows:
            continue
        if read == "v":
            output = centred_output(group, layer)
            shared, second = output.w_v, output.w_o[rows].mT
        else:
            w_q, w_k = fold_attention(group, layer).operator_factors()
            shared, second = (w_k[:1], w_q[rows]) if read == "k" else (w_q[rows], w_k[:1])
        triangle = _triangle(second)
        sizes = torch.linalg.matrix_norm(_triangle(shared) @ triangle.mT)
        triangle = triangle / sizes[:, None, None]
        factors += [*shared]
        triangles += [triangle] if len(shared) == 1 else triangle.split(1)
    return _Readings(torch.cat(factors, dim=1), triangles)


def _triangle(factor: Float64[Tensor, "heads rows columns"]) -> Float64[Tensor, "heads m columns"]:
    """Return R of the QR decomposition of each head's factor, a tensor [heads, min(rows, columns), columns]."""
    return torch.linalg.qr(factor, mode="r").R


def _written(raw: RawAttention, layer: int) -> Float64[Tensor, "heads m d_model"]:
    """Return W_V W_O of each head of layer `layer`, scaled to norm 1. `raw` has the parameters of the layer.

    An orthogonal matrix on the left is left out (it does not change a norm), so a head has d_head rows, not d_model.
    """
    writes = []
    for _, group in key_value_groups(raw):  # one group in float64 at a time
        output = centred_output(group, layer)
        writes.append(_triangle(output.w_v) @ output.w_o)
    joined = torch.cat(writes)
    return joined / torch.linalg.matrix_norm(joined)[:, None, None]


def _scores(writes: Float64[Tensor, "heads m d_model"], readings: _Readings) -> Float64[Tensor, "receivers heads"]:
    """Return a tensor [receivers, senders]: ||M OV^T|| of every receiver in `readings` with every head of an earlier
    layer.

    M is the operator by which the receiver reads. `writes` are the senders' OV = W_V W_O. Both operators have norm 1.
    """

    def times(left: Tensor, right: Tensor) -> Tensor:
        # Head by head, because equal heads must have exactly equal scores.
        return torch.bmm(left, right.expand(len(left), -1, -1))

    d_head = readings.triangles[0].shape[-1]
    scores = []
    for read, triangles in zip(times(writes, readings.factors).split(d_head, 2), readings.triangles, strict=True):
        joined = rearrange(triangles, "receiver row d_head -> (receiver row) d_head")
        product = rearrange(
            times(read, joined.T), "head m (receiver row) -> head m receiver row", receiver=len(triangles)
        )
        scores.append(torch.linalg.vector_norm(product, dim=(1, 3)).T)
    return torch.cat(scores)
