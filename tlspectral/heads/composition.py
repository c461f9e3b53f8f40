"""How strongly an earlier head can feed a later one: K-, Q- and V-composition, from weights."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from torch import Tensor

from tlspectral.algebra.nulls import one_thread
from tlspectral.algebra.spectra import ThinProduct
from tlspectral.heads.operators.factored import centred_output
from tlspectral.models.opening import open_layers
from tlspectral.models.reading.layer import RawAttention, fold_attention, key_value_groups
from tlspectral.models.reading.view import AttentionView, require_one_run
from tlspectral.models.stream.writes import Input
from tlspectral.selection import Head, Receiver, head_receiver, heads_by_layer
from tlspectral.tables.head_columns import HEAD
from tlspectral.tables.schema import Schema, columns

if TYPE_CHECKING:
    from tlspectral.models.checkpoints.layers import CheckpointLayers, Side

COMPOSITION = columns("""
    score  | ratio | ||M OV^T|| / (||M|| ||OV||), OV of the earlier head and M of the one that reads; M^T for its
           |       | queries, its OV for its values.
    chance | ratio | 1 / sqrt(d_model): the score of operators with random frames.
    rank   | index | Rank of the score among all heads of all earlier layers; 1 is the strongest.
""")
K_COMPOSITION = Schema(
    "k_composition", (*HEAD, *COMPOSITION), "`tls.k_composition`; layer and head are those of the earlier head"
)


def k_composition(model: Any, receiver: Head | Receiver) -> pd.DataFrame:
    """Score how strongly each head of an earlier layer can feed a receiver (Elhage et al. 2021; FP section 4).

    `score = ||M OV^T|| / (||M|| ||OV||)` for the keys of a head, with M^T in place of M for its queries and
    `||OV_earlier OV_head||` for its values; Frobenius norms, from thin factors alone. M is norm-folded, and OV, like M,
    is centred under LayerNorm. Both are those of the head that is named, also where heads share keys and values.

        tls.k_composition(model, "L5H1.q")  # who feeds its queries
        tls.k_composition(model, "L5H1")  # its keys: the same as "L5H1.k"

    Args:
        model: a TransformerBridge or HookedTransformer, a model of transformers, or a name or path. A folder of
            safetensors or a hub model is read from its files, one layer's values and output at a time, without loading
            it (architectures: `models.checkpoints.layers.STREAMED_MODEL_TYPES`); other names are loaded.
        receiver: what a head reads: `"L5H1.k"`, `"L5H1.q"`, `"L5H1.v"` or a `Receiver`. A head alone, "L5H1", (5, 1) or
            a table row, means its keys.

    Returns:
        DataFrame, best first; empty for a receiver in layer 0. Columns: `layer, head, name, score, chance, rank`.
        `attrs` hold where the model came from, with hashes of the receiver's layer and all earlier ones.

    Raises:
        BadHead: no such head, or keys or values of a group (`"L5KV0.k"`), which have several operators.
        BadWeights, UnsupportedArchitecture: a layer cannot be read.

    What it does not establish: that the path is used. The score sees weights, not what is on the residual stream, and
    the number of heads to be ranked among grows with the layer. `chance` is a typical value without its spread, and no
    threshold. The gain of a norm behind the attention (Gemma 2 and 3, OLMo 2) or on the stream (GPT, OPT 350M, BERT),
    which weighs what a head writes, is left out.
    """
    end = head_receiver(receiver)
    source = open_layers(model)
    if isinstance(source, AttentionView):
        require_one_run(source, "no layer is earlier than all runs of another")
    [(layer, [head])] = heads_by_layer(source, [end]).items()
    side: Side = "output" if end.input == "v" else "query-key"
    earlier_layers = [index for index in source.layers if index < layer]
    if not isinstance(source, AttentionView):
        source.prepare([layer], side)
        source.prepare(earlier_layers, "output")
    rows = []
    with one_thread():
        with _layer(source, layer, side) as raw:
            reading = _reading(raw, layer, head, end.input)
        for earlier in earlier_layers:
            with _layer(source, earlier, "output") as raw:
                scores = _scores_of_layer(raw, earlier, [reading])[0]
            rows += [(earlier, i, score) for i, score in enumerate(scores.tolist())]
    table = pd.DataFrame(rows, columns=["layer", "head", "score"])
    table = table.sort_values(["score", "layer", "head"], ascending=[False, True, True], ignore_index=True)
    table = table.assign(chance=source.d_model**-0.5, rank=np.arange(1, len(table) + 1))
    return K_COMPOSITION.frame(table, source.origin(range(layer + 1)))


@contextmanager
def _layer(source: "AttentionView | CheckpointLayers", index: int, side: "Side") -> Iterator[RawAttention]:
    if isinstance(source, AttentionView):
        yield source.raw(index)
    else:
        from tlspectral.models.checkpoints.layers import layer_named

        with source.layer(index, side) as view, layer_named(index):
            yield view.raw(0)


def composition_into(
    view: AttentionView, layer: int, heads: list[int], what: Input, earlier: Iterable[int]
) -> dict[int, Float64[Tensor, "receivers heads"]]:
    """Return the scores of `k_composition` of all heads of some earlier layers with heads of one layer, by layer."""
    with one_thread():
        raw = view.raw(layer)
        readings = [_reading(raw, layer, head, what) for head in heads]
        return {index: _scores_of_layer(view.raw(index), index, readings) for index in earlier}


class _Reading(NamedTuple):
    """A head's operator as it reads an earlier head: the factor that reads, the triangle of the other, the norm."""

    factor: Float64[Tensor, "d_model d_head"]
    triangle: Float64[Tensor, "m d_head"]
    norm: float


def _reading(raw: RawAttention, layer: int, head: int, what: Input) -> _Reading:
    heads, group = next((heads, group) for heads, group in key_value_groups(raw) if head < heads.stop)
    index = head - heads.start
    if what == "v":
        output = centred_output(group, layer)
        reading, other = output.w_v[0], output.w_o[index].T
    else:
        w_q, w_k = fold_attention(group, layer).operator_factors()
        reading, other = (w_k[index], w_q[index]) if what == "k" else (w_q[index], w_k[index])
    return _Reading(reading, torch.linalg.qr(other, mode="r").R, ThinProduct(reading, other).norm())


def _scores_of_layer(raw: RawAttention, layer: int, readings: list[_Reading]) -> Float64[Tensor, "receivers heads"]:
    """Return `||M OV^T|| / (||M|| ||OV||)` of every head of a layer, computed one key/value group at a time."""
    scores = []
    for _, group in key_value_groups(raw):
        output = centred_output(group, layer)
        read = torch.linalg.qr(output.w_v[0], mode="r").R
        sizes = torch.linalg.matrix_norm(read @ torch.linalg.qr(output.w_o.mT, mode="r").R.mT)
        through = [
            torch.linalg.matrix_norm(read @ (output.w_o @ reading.factor) @ reading.triangle.T) for reading in readings
        ]
        norms = torch.tensor([reading.norm for reading in readings], dtype=torch.float64)
        scores.append(torch.stack(through) / sizes / norms[:, None])
    return torch.cat(scores, dim=1)
